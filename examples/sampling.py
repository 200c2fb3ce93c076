"""Sample with seeds: a request's tokens do not depend on the other requests in the batch.

The random numbers of a token depend only on the request's seed and the token's position, so the
same request gives the same tokens alone and in a batch.
"""

from shmllm import LLM, SamplingParams

PROMPT = "def parse(text):"


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=seed, max_tokens=24)


with LLM() as llm:
    alone = llm.generate(PROMPT, params(7), use_tqdm=False)[0].outputs[0]

    seeds = [1, 2, 3, 7, 4, 5]
    batch = llm.generate([PROMPT] * len(seeds), [params(seed) for seed in seeds], use_tqdm=False)
    in_batch = batch[seeds.index(7)].outputs[0]

for seed, output in zip(seeds, batch, strict=True):
    print(f"seed {seed}: {output.outputs[0].text!r}")
print(f"seed 7 alone: {alone.text!r}")
print(f"same tokens alone and in the batch: {alone.token_ids == in_batch.token_ids}")
