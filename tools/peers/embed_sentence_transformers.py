"""Runs sentence-transformers as an embedding peer of `tools/bench_embed.py`.

It sorts the texts by their lengths itself, and pads each batch to its longest text.
"""

from __future__ import annotations

from typing import Any

from peer import Embed, serve_embeddings

BATCH_SIZES = (8, 16, 32, 64, 128)


def load(model: str, options: dict[str, Any]) -> tuple[Embed, dict[str, Any]]:
    import sentence_transformers
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    loaded = sentence_transformers.SentenceTransformer(
        model, device="cpu", model_kwargs={"dtype": options["dtype"]}
    )

    def embed(texts: list[str], batch_size: int) -> Any:
        return loaded.encode(texts, batch_size=batch_size, show_progress_bar=False)

    facts = {
        "version": sentence_transformers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": loaded[0].auto_model.config._attn_implementation,
        "settings": [{"batch_size": size} for size in BATCH_SIZES],
    }
    return embed, facts


if __name__ == "__main__":
    serve_embeddings(load)
