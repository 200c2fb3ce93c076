"""Compute embeddings of prompts, and rank prompts by their similarity to a query.

Every model that generates also gives embeddings: the hidden state of the last token, or the mean of
all hidden states, normalised. Requests to generate and to embed run in the same steps.
"""

from shmllm import LLM, PoolingParams

PROMPTS = [
    "def read_file(path):\n    with open(path) as file:\n        return file.read()\n",
    "def load_text(name):\n    with open(name) as stream:\n        return stream.read()\n",
    "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    pass\n",
]
QUERY = "def read_lines(path):\n    with open(path) as file:\n        return list(file)\n"

with LLM() as llm:
    for output in llm.embed(PROMPTS, use_tqdm=False):
        embedding = output.outputs
        start = ", ".join(f"{value:.3f}" for value in embedding.embedding[:3])
        print(f"{embedding.hidden_size} components: {start}, ...")

    mean = PoolingParams(pooling_type="MEAN")
    scores = llm.score(QUERY, PROMPTS, pooling_params=mean, use_tqdm=False)

ranked = sorted(zip(scores, PROMPTS, strict=True), key=lambda pair: -pair[0].outputs.score)
for output, prompt in ranked:
    print(f"{output.outputs.score:.3f}  {prompt.splitlines()[0]}")
