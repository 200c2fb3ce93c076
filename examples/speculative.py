"""Draft tokens, check several of them in a step, and print how many steps and drafts that takes.

The output is a changed copy of something in the prompt, so much of it can be drafted by looking up
what followed the last tokens before. Drafts change the number of steps and not the tokens.
"""

from pathlib import Path

from shmllm import LLM, SamplingParams

PROMPT = Path(__file__).with_name("code_edit.txt").read_text()
CLASS = PROMPT.partition("```python\n")[2].removesuffix("```\n")
# A model that follows instructions gets the whole PROMPT. The bundled one only completes code.
prompt = f"{CLASS}\n\n{CLASS.replace('total', 'balance')[:500]}"
params = SamplingParams(temperature=0, max_tokens=160)

texts = []
for name, options in {
    "no drafts": None,
    "ngram": {"method": "ngram", "adaptive": False},
    "suffix": {"method": "suffix", "adaptive": False},
}.items():
    with LLM(speculative_config=options) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        texts.append(output.outputs[0].text)
        num_tokens, num_steps = len(output.outputs[0].token_ids), output.metrics.num_steps
        line = f"{name}: {num_tokens} tokens in {num_steps} steps"
        counters = llm.get_metrics()
        if counters["draft_tokens"]:
            share = counters["accepted_tokens"] / counters["draft_tokens"]
            line += f", {share:.0%} of {counters['draft_tokens']} drafted tokens accepted"
        print(line)

print(f"same text: {len(set(texts)) == 1}")
