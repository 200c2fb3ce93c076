"""Runs vLLM as a peer of `tools/compare.py`."""

from __future__ import annotations

from typing import Any

from peer import Generate, serve, turns


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    loras = [LoRARequest(path, i, path) for i, path in enumerate(options.pop("loras", []), 1)]
    llm = LLM(model=model, disable_log_stats=True, **options)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=True
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            params,
            use_tqdm=False,
            lora_request=turns(loras, len(prompts)),
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    dtype = options["dtype"]
    return generate, {"version": vllm.__version__, "weights": dtype, "kv_cache": dtype}


if __name__ == "__main__":
    serve(load)
