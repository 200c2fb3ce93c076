"""Files of Qwen 3 Next: those that have the gates of delta nets apart, and the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gguf_loading import loaded
from support.gguf_models import with_joined_gates, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import (
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
)
from support.variants import slow

from shmllm.models.matrices import parts_of

FAMILY, OPTIONS = READ_ALONE["qwen3 next"]
OPTIONS = OPTIONS | {"hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32}
OPTIONS |= {"shared_expert_intermediate_size": 32}
"""Rows of whole blocks."""
TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


@pytest.mark.parametrize("kind", ["F32", slow("Q8_0")])
def test_the_first_files_give_the_same_model(kind: str, tmp_path: Path) -> None:
    reference = reference_model(FAMILY, 4.0, **OPTIONS)
    first = write_model(tmp_path / "a.gguf", reference, kind=kind, rearrange=with_joined_gates)
    later = write_model(tmp_path / "b.gguf", reference, kind=kind)
    models = [loaded(file, tmp_path / file.stem) for file in (first, later)]
    found, wanted = (our_logits(model, TOKENS) for model in models)
    assert torch.equal(found, wanted)
    if kind == "F32":
        assert_logits_close(found, reference_logits(reference, TOKENS), 1e-4)


def test_the_projections_of_delta_nets_stay_packed(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", reference_model(FAMILY, **OPTIONS), kind="Q8_0")
    model = loaded(file, tmp_path / "model")
    names = ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
    found = [
        parts_of(view)
        for name, (view, *_) in model.destinations().items()
        if "linear_attn" in name and name.endswith(names)
    ]
    assert len(found) == 9
    assert all(getattr(part, "kind", None) == "q8_0" for parts in found for part in parts)
