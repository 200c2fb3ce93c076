"""Files of Gemma 4 may have keys and values of layers that read those of earlier layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.gguf_loading import loaded
from support.gguf_models import StoredTensors, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import our_logits, reference_model
from support.variants import slow

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


def with_unread_keys(tensors: StoredTensors) -> StoredTensors:
    yield from tensors
    for layer, width in ((4, 16), (5, 32)):
        for module in ("attn_k", "attn_v"):
            values = np.ones((2 * width, 64), np.float32)
            yield module, f"blk.{layer}.{module}.weight", values
        yield "norm", f"blk.{layer}.attn_k_norm.weight", np.ones(width, np.float32)


@pytest.mark.parametrize("kind", ["Q8_0", slow("F32")])
def test_keys_that_no_layer_reads_are_left_out(kind: str, tmp_path: Path) -> None:
    family, options = READ_ALONE["gemma 4 with inputs of layers"]
    widths = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    widths["hidden_size_per_layer_input"] = 32
    reference = reference_model(family, 4.0, **options | widths)
    files = [
        write_model(tmp_path / "without.gguf", reference, kind=kind),
        write_model(tmp_path / "with.gguf", reference, kind=kind, rearrange=with_unread_keys),
    ]
    first, second = (our_logits(loaded(file, tmp_path / file.stem), TOKENS) for file in files)
    assert torch.equal(first, second)
