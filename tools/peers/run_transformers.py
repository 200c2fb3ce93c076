"""Runs transformers' `generate` as a peer of `tools/compare.py`: one batch, all cores."""

from __future__ import annotations

import os
from typing import Any

from peer import Generate, serve


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, options["dtype"])
    ).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    facts = {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "weights": options["dtype"],
        "kv_cache": options["dtype"],
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
