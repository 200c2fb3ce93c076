"""Runs OpenVINO GenAI's continuous batching as a peer of `tools/compare.py`.

It exports the model to a temporary directory first, which the time to its first token includes.
Keys and values have the dtype of the model; by default OpenVINO rounds them to 8 bits.
"""

from __future__ import annotations

import tempfile
from typing import Any

from peer import Generate, serve

PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import openvino
    import openvino_genai
    from optimum.exporters.openvino import main_export

    precision = PRECISIONS[options["dtype"]]
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = options["kv_cache_gib"]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    with tempfile.TemporaryDirectory() as directory:
        main_export(model, directory, task="text-generation-with-past")
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            directory, scheduling, "CPU", properties
        )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_len, min_new_tokens=output_len, ignore_eos=True, do_sample=False
        )
        tensors = [openvino.Tensor([ids]) for ids in prompts]
        results = pipeline.generate(tensors, [config] * len(prompts))
        return [list(result.m_generation_ids[0])[-output_len:] for result in results]

    facts = {"version": openvino_genai.__version__, "kv_cache": precision}
    return generate, facts


if __name__ == "__main__":
    serve(load)
