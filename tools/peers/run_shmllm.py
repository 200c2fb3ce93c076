"""Runs shmllm as a peer of `tools/compare.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer import Generate, serve, turns


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import shmllm
    from shmllm import LLM, LoRARequest, SamplingParams

    loras = [LoRARequest(path, i, path) for i, path in enumerate(options.pop("loras", []), 1)]
    llm = LLM(model, **options)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate(
            prompts, params, use_tqdm=False, lora_request=turns(loras, len(prompts))
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    facts = {
        "version": shmllm.__version__,
        "weights": options["quantization"]
        or (Path(model).suffix.lstrip(".") if Path(model).is_file() else options["dtype"]),
        "activations": options["activation_dtype"],
        "kv_cache": options["dtype"],
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
