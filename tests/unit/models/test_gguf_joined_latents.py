"""Files of latent attention from before llama.cpp kept latents: they have one tensor for what
projects these to keys and values, and the model is that of a file with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gguf_loading import loaded
from support.gguf_models import as_before_latents, with_joined_latents, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import (
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
)
from support.variants import slow

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


@pytest.mark.parametrize("case", ["deepseek v2", slow("deepseek v3 with groups")])
def test_the_model_is_that_of_a_file_with_two_projections(case: str, tmp_path: Path) -> None:
    family, options = READ_ALONE[case]
    reference = reference_model(family, 4.0, **options)
    change = as_before_latents(reference.config)
    old = write_model(tmp_path / "old.gguf", reference, change, rearrange=with_joined_latents)
    models = [
        loaded(file, tmp_path / file.stem)
        for file in (old, write_model(tmp_path / "new.gguf", reference))
    ]
    found, wanted = (our_logits(model, TOKENS) for model in models)
    assert torch.equal(found, wanted)
    assert_logits_close(found, reference_logits(reference, TOKENS), 1e-4)


def test_the_joined_projections_may_be_packed(tmp_path: Path) -> None:
    family, options = READ_ALONE["deepseek v2"]
    widths = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    widths |= {"q_lora_rank": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    widths |= {"qk_nope_head_dim": 32, "v_head_dim": 32}
    reference = reference_model(family, **options | widths)
    change = as_before_latents(reference.config)
    model = loaded(
        write_model(
            tmp_path / "m.gguf", reference, change, kind="Q8_0", rearrange=with_joined_latents
        ),
        tmp_path / "model",
    )
    stored = reference.state_dict()
    for name, (view, *_) in model.destinations().items():
        if "kv_b_proj" in name:
            torch.testing.assert_close(view.clone(), stored[name], rtol=0, atol=2e-3)
