"""The files of Gemma 3 and OLMo 3: the rotations of both types of layers in each form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from transformers import AutoModelForCausalLM

TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 7,
        "num_hidden_layers": 7,
    },
    "olmo3": {"sliding_window": 7, "num_hidden_layers": 5},
}
PLAIN = {"rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 4.0}
FORMS: dict[str, dict[str, Any]] = {
    "absent": {},
    "transformers-4": {
        "rope_theta": 1e5,
        "rope_local_base_freq": 500.0,
        "rope_scaling": LINEAR,
        "sliding_window_pattern": 3,
    },
    "nested": {
        "rope_parameters": {
            "sliding_attention": PLAIN | {"rope_theta": 300.0},
            "full_attention": LINEAR | {"rope_theta": 2e5},
        }
    },
    "nested-full-alone": {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 2e5}}},
    "nested-without-theta": {
        "rope_theta": 1e5,
        "rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR},
    },
    "nested-beside-local-theta": {
        "rope_local_base_freq": 700.0,
        "rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN},
    },
    "nested-beside-scaling": {
        "rope_scaling": LINEAR | {"rope_theta": 2e5},
        "rope_parameters": {
            "sliding_attention": PLAIN | {"rope_theta": 300.0},
            "full_attention": PLAIN,
        },
    },
    "nested-with-theta-beside-scaling": {
        "rope_scaling": LINEAR,
        "rope_parameters": {
            "sliding_attention": PLAIN | {"rope_theta": 300.0},
            "full_attention": PLAIN | {"rope_theta": 2e5},
        },
    },
}
"""The fields of config.json that say how layers with a window and full layers rotate."""
REPLACED = ("rope_parameters", "layer_types")


CASES = [
    (family, form)
    for family in FAMILIES
    for form, fields in FORMS.items()
    # transformers 5 reads it for OLMo 3's full layers alone, transformers 4 read it for all.
    if family != "olmo3" or "rope_theta" not in fields
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_each_form_of_rotations_equals_transformers(form: str, family: str, tmp_path: Path) -> None:
    save(reference_model(family, 4.0, **FAMILIES[family]), tmp_path)
    path = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in REPLACED}
    path.write_text(json.dumps(config | FORMS[form]))
    auto: Any = AutoModelForCausalLM  # its methods have no annotations
    reference = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = reference_logits(reference, TOKENS)
    assert_logits_close(our_logits(load(tmp_path), TOKENS), expected, 1e-4)
