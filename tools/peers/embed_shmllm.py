"""Runs shmllm as an embedding peer of `tools/bench_embed.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from peer import Embed, serve_embeddings


def load(model: str, options: dict[str, Any]) -> tuple[Embed, dict[str, Any]]:
    import shmllm

    llm = shmllm.LLM(
        model,
        dtype=options["dtype"],
        num_threads=options["threads"],
        enable_prefix_caching=False,  # every round has the same texts
    )

    def embed(texts: list[str]) -> Any:
        outputs = llm.embed(texts, use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    facts = {
        "version": shmllm.__version__,
        "dtype": llm.facts.dtype,
        "settings": [{}],
    }
    return embed, facts


if __name__ == "__main__":
    serve_embeddings(load)
