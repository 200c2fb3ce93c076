"""Runs ONNX Runtime as an embedding peer of `tools/bench_embed.py`.

It exports the model to a temporary directory at its start. The graph as it was exported and the one
that ONNX Runtime's optimizer for BERT makes of it are two settings, because either may be faster;
both get the optimizations of a session.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from encoder_graph import BATCH_SIZES, Array, MeanPooled, SortedBatches, example_batch
from peer import Embed, serve_embeddings

NAMES = ["input_ids", "attention_mask"]


def export(model: str, file: Path) -> None:
    """Writes the model as a graph with two dynamic axes."""
    with torch.inference_mode():
        torch.onnx.export(
            MeanPooled(model, "eager"),
            example_batch(),
            str(file),
            input_names=NAMES,
            output_names=["vectors"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in NAMES},
            dynamo=False,  # the other exporter's graph has no attention that `fuse` finds
        )


def fuse(model: str, exported: Path, file: Path) -> dict[str, int]:
    """Writes the fused graph; returns the number of fused operators of each kind."""
    from onnxruntime.transformers.optimizer import optimize_model

    config = json.loads((Path(model) / "config.json").read_text())
    optimized = optimize_model(
        str(exported),
        model_type="bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        opt_level=0,
    )
    optimized.save_model_to_file(str(file))
    fused: dict[str, int] = optimized.get_fused_operator_statistics()
    return {name: count for name, count in fused.items() if count}


def load_session(file: Path, threads: int) -> Any:
    """A session that uses so many threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def load(model: str, options: dict[str, Any]) -> tuple[Embed, dict[str, Any]]:
    import onnxruntime

    threads = options["threads"]
    numbers_of_streams = sorted({1, threads})
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / "exported.onnx", Path(directory) / "fused.onnx"]
        export(model, files[0])
        operators = fuse(model, *files)
        sessions = {
            (fused, streams): load_session(file, threads // streams)
            for fused, file in enumerate(files)
            for streams in numbers_of_streams
        }
    batches = SortedBatches(model)

    def embed(texts: list[str], batch_size: int, streams: int, fused: int) -> Array:
        def run(ids: Array, mask: Array) -> Array:
            vectors: Array
            inputs = dict(zip(NAMES, (ids, mask), strict=True))
            [vectors] = sessions[fused, streams].run(None, inputs)
            return vectors

        return batches.embed(texts, batch_size, [run] * streams)

    facts = {
        "version": onnxruntime.__version__,
        "dtype": "float32",
        "fused": operators,
        "settings": [
            {"batch_size": size, "streams": streams, "fused": fused}
            for fused, streams in sessions
            for size in BATCH_SIZES
        ],
    }
    return embed, facts


if __name__ == "__main__":
    serve_embeddings(load)
