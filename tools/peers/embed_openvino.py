"""Runs OpenVINO as an embedding peer of `tools/bench_embed.py`.

It converts the model at its start.
"""

from __future__ import annotations

from typing import Any

import torch
from encoder_graph import BATCH_SIZES, Array, MeanPooled, Run, SortedBatches, example_batch
from peer import Embed, serve_embeddings

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def load(model: str, options: dict[str, Any]) -> tuple[Embed, dict[str, Any]]:
    import openvino

    threads = options["threads"]
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if options["dtype"] != "auto":
        properties["INFERENCE_PRECISION_HINT"] = PRECISIONS[options["dtype"]]
    ids, mask = example_batch()
    with torch.inference_mode():
        converted = openvino.convert_model(
            MeanPooled(model, "sdpa"), example_input={"input_ids": ids, "attention_mask": mask}
        )
    compiled = {
        streams: openvino.Core().compile_model(
            converted, "CPU", properties | {"NUM_STREAMS": streams}
        )
        for streams in sorted({1, threads})
    }

    def stream_of(request: Any) -> Run:
        def run(ids: Array, mask: Array) -> Array:
            vectors: Array = request.infer([ids, mask], share_inputs=True)[0]
            return vectors

        return run

    runs = {
        streams: [stream_of(each.create_infer_request()) for _ in range(streams)]
        for streams, each in compiled.items()
    }
    batches = SortedBatches(model)

    def embed(texts: list[str], batch_size: int, streams: int) -> Array:
        return batches.embed(texts, batch_size, runs[streams])

    precision = compiled[1].get_property("INFERENCE_PRECISION_HINT").to_string()
    facts = {
        "version": openvino.__version__.partition("-")[0],
        "dtype": DTYPES[precision],
        "settings": [
            {"batch_size": size, "streams": streams} for streams in runs for size in BATCH_SIZES
        ],
    }
    return embed, facts


if __name__ == "__main__":
    serve_embeddings(load)
