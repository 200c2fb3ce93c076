"""Files of Gemma 3n and 4 may have keys and values of layers that read those of earlier layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_loading import loaded
from support.gguf_models import with_unread_keys, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import our_logits, reference_model
from support.variants import slow

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
WIDTHS |= {"hidden_size_per_layer_input": 32}
CASES: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "gemma 3n": ({"num_kv_shared_layers": 2, "laurel_rank": 8}, {9: 16, 10: 16}),
    "gemma 4 with inputs of layers": ({}, {4: 16, 5: 32}),
}
"""Further options, and the width of heads of the layers that read keys of earlier ones."""


@pytest.mark.parametrize(
    ("case", "kind"),
    [("gemma 4 with inputs of layers", "Q8_0"), slow("gemma 3n", "Q8_0")]
    + [slow(case, "F32") for case in CASES],
)
def test_keys_that_no_layer_reads_are_left_out(case: str, kind: str, tmp_path: Path) -> None:
    family, options = READ_ALONE[case]
    own, layers = CASES[case]
    reference = reference_model(family, 4.0, **options | WIDTHS | own)
    unread = partial(with_unread_keys, layers=layers, hidden_size=64)
    files = [
        write_model(tmp_path / "without.gguf", reference, kind=kind),
        write_model(tmp_path / "with.gguf", reference, kind=kind, rearrange=unread),
    ]
    first, second = (our_logits(loaded(file, tmp_path / file.stem), TOKENS) for file in files)
    assert torch.equal(first, second)
