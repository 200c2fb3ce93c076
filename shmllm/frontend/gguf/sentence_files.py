"""Makes the files of sentence-transformers of what a GGUF file says of vectors: how they are
pooled, and what projects them.

llama.cpp divides vectors by their Euclidean norm, and so do these files.
"""

from __future__ import annotations

from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.frontend.gguf.metadata import Metadata

Json = Any

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_NONE, _RANK = 0, 4
"""llama.cpp's numbers of poolings."""
_MODULE = "sentence_transformers.models"
_DENSE = "dense_2", "dense_3"


def sentence_files(header: GgufHeader) -> dict[str, Json]:
    """The contents of the files by their names; empty if the file says nothing of a pooling, or
    that vectors stay those of tokens, or that scores are made of them.

    Raises:
        EngineStartError: the pooling is unknown.
    """
    kind = Metadata(header).find("pooling_type")
    if kind in (None, _NONE, _RANK):
        return {}
    if not isinstance(kind, int) or kind not in _POOLINGS:
        raise header.error(f"pooling_type {shown(kind)} is not known; known: 0 to {_RANK}")
    mode = {"pooling_mode": _POOLINGS[kind]}
    modules = [("Transformer", None), ("Pooling", mode)]
    modules += [
        ("Dense", _dense(header, name)) for name in _DENSE if f"{name}.weight" in header.tensors
    ]
    modules.append(("Normalize", None))
    files: dict[str, Json] = {"modules.json": []}
    for index, (name, settings) in enumerate(modules):
        path = f"{index}_{name}" if index else ""
        files["modules.json"].append(
            {"idx": index, "name": str(index), "path": path, "type": f"{_MODULE}.{name}"}
        )
        if settings is not None:
            files[f"{path}/config.json"] = settings
    return files


def _dense(header: GgufHeader, name: str) -> Json:
    outputs, inputs = header.tensors[f"{name}.weight"].shape
    return {
        "in_features": inputs,
        "out_features": outputs,
        "bias": f"{name}.bias" in header.tensors,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
