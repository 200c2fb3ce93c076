"""Run more prompts through an engine than there is memory for, and watch one as it grows.

`LLM.stream` takes prompts from any iterable as the engine gets through them. A prompt that
cannot be served need not end it.
"""

from collections import Counter
from itertools import islice

from shmllm import LLM, RequestOutputKind, SamplingParams

NUM_PROMPTS = 200
short = SamplingParams(temperature=0, max_tokens=4)
long = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)


def prompts():
    """Made when they are wanted; every fiftieth is empty, which is an error."""
    for number in range(NUM_PROMPTS):
        yield f"value_{number} =" if number % 50 else []


with LLM() as llm:
    print("One by one, in the order in which they finish:")
    reasons = Counter()
    for output in llm.stream(prompts(), short, on_error="yield"):
        reasons[output.outputs[0].finish_reason] += 1
        if output.error:
            print("  failed:", output.error)
    print("  ended by", dict(reasons))

    print("In the order of the prompts:")
    stream = llm.stream(prompts(), short, on_error="yield", ordered=True)
    print("  first", [output.prompt_index for output in islice(stream, 5)])
    stream.close()  # ends what runs

    print("As it comes:")
    for output in llm.stream("def fibonacci(n):\n", long):
        print(output.outputs[0].text, end="", flush=True)
    print()
