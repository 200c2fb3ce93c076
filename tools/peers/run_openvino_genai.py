"""Runs OpenVINO GenAI's continuous batching as a peer of `tools/compare.py`.

It exports the model to a temporary directory first, which the time to its first token includes.
Keys and values have the dtype of the model; by default OpenVINO rounds them to 8 bits. Quantized
weights, the embedding table and the LM head included, are symmetric: int8 has one scale for each
output channel, int4 one for each 32 weights, as in llama.cpp's Q4_0. OpenVINO decides how it rounds
activations.
"""

from __future__ import annotations

import tempfile
from typing import Any

from peer import Generate, serve

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0, "all_layers": True},
}
PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import openvino
    import openvino_genai
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    precision = PRECISIONS[options["dtype"]]
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = options["kv_cache_gib"]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    with tempfile.TemporaryDirectory() as directory:
        # Without a configuration the export rounds models above 1e9 parameters to 8 bits.
        rounding = QUANTIZATIONS.get(options["quantization"])
        config = OVConfig(quantization_config=rounding and OVWeightQuantizationConfig(**rounding))
        main_export(model, directory, task="text-generation-with-past", ov_config=config)
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

    facts = {
        "version": openvino_genai.__version__,
        "weights": options["quantization"] or precision,
        "kv_cache": precision,
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
