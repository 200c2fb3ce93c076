"""Stream the results of more prompts than memory could hold, and the text of one prompt.

`LLM.stream` takes prompts from any iterable when the engine has room for them. With
`on_error="yield"` an invalid prompt gives a result with an error instead of an exception.
"""

from collections import Counter
from itertools import islice

from shmllm import LLM, RequestOutputKind, SamplingParams

NUM_PROMPTS = 200
short = SamplingParams(temperature=0, max_tokens=4)
long = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)


def prompts():
    """Yields prompts one at a time; every fiftieth is empty, which is an error."""
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
    stream.close()  # aborts the running requests

    print("Token by token:")
    for output in llm.stream("def fibonacci(n):\n", long):
        print(output.outputs[0].text, end="", flush=True)
    print()
