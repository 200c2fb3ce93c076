"""Complete several prompts as one batch.

The results have the order of the prompts. Each holds its tokens and its finish reason.
"""

from shmllm import LLM, SamplingParams

PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):",
]

params = SamplingParams(temperature=0, max_tokens=48, stop=["\n\n\n"])

with LLM() as llm:
    outputs = llm.generate(PROMPTS, params)

for output in outputs:
    completion = output.outputs[0]
    ending = completion.finish_reason
    if completion.stop_reason is not None:
        ending += f" ({completion.stop_reason!r})"
    print(f"=== {len(completion.token_ids)} tokens, ended by {ending}")
    print(output.prompt + completion.text)
