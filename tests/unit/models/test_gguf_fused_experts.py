"""Experts whose gates and ups are one tensor of a GGUF file, each gate above its up: the model is
that of the file that has them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_loading import loaded
from support.gguf_models import StoredTensors, with_fused_experts, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import reference_model
from support.variants import slow
from transformers import PreTrainedModel

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import model_config
from shmllm.models.matrices import packed_of

WIDE = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
GRANITE = MIXTRAL | {"shared_intermediate_size": 32}
LFM2 = {"num_experts": 5, "num_experts_per_tok": 2, "num_dense_layers": 1}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv"]}


QWEN35 = READ_ALONE["qwen3.5 with experts"][1] | {"shared_expert_intermediate_size": 32}
DEEPSEEK = READ_ALONE["deepseek v3 with groups"][1] | {"q_lora_rank": 32, "num_key_value_heads": 4}
DEEPSEEK |= {"qk_nope_head_dim": 32, "v_head_dim": 32}


def model_of(family: str, options: dict[str, Any]) -> PreTrainedModel:
    """A model whose rows have whole blocks."""
    return reference_model(family, **options | WIDE | {"num_attention_heads": 4})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5_moe", QWEN35),
        ("granite_moe_shared", GRANITE),
        slow("deepseek_v3", DEEPSEEK),
        slow("mixtral", MIXTRAL),
        slow("lfm2_moe", LFM2),
    ],
)
def test_the_model_is_that_of_a_file_with_two_tensors(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = model_of(family, options)
    files = [
        write_model(tmp_path / "apart.gguf", model, kind="Q8_0"),
        write_model(tmp_path / "together.gguf", model, kind="Q8_0", rearrange=with_fused_experts),
    ]
    apart, together = (set(read_header(file).tensors) for file in files)
    new = {name for name in together - apart if "ffn_gate_up_exps" in name}
    assert together - apart == new != set()
    first, second = (loaded(file, tmp_path / file.stem).destinations() for file in files)
    assert first.keys() == second.keys()
    num_packed = 0
    for name, (view, *_) in first.items():
        other = second[name][0]
        assert torch.equal(other.clone(), view.clone()), name
        kinds = [getattr(packed_of(each), "kind", None) for each in (view, other)]
        assert kinds[0] == kinds[1], name
        num_packed += "experts" in name and kinds == ["q8_0", "q8_0"]
    assert num_packed


def test_gemma_4_may_have_two_tensors(tmp_path: Path) -> None:
    """The conversion writes one."""

    def apart(tensors: StoredTensors) -> StoredTensors:
        for name, stored, values in tensors:
            if "gate_up" not in stored:
                yield name, stored, values
                continue
            for kind, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                yield name, stored.replace("gate_up", kind), half

    options = READ_ALONE["gemma 4 with experts"][1] | {"num_key_value_heads": 2}
    model = model_of("gemma4", options | {"num_global_key_value_heads": 2})
    first, second = (
        loaded(write_model(tmp_path / f"{name}.gguf", model, **form), tmp_path / name)
        for name, form in (
            ("one", {"kind": "Q8_0"}),
            ("two", {"kind": "Q8_0", "rearrange": apart}),
        )
    )
    others = second.destinations()
    for name, (view, *_) in first.destinations().items():
        assert torch.equal(others[name][0].clone(), view.clone()), name
        if ".experts." in name:
            packed = packed_of(view), packed_of(others[name][0])
            assert [each and each.kind for each in packed] == ["q8_0", "q8_0"], name


def test_a_file_with_both_is_refused(tmp_path: Path) -> None:
    file = write_model(
        tmp_path / "m.gguf",
        model_of("mixtral", MIXTRAL),
        lambda writer: writer.add_tensor(
            "blk.1.ffn_up_exps.weight", np.ones((5, 32, 64), np.float32)
        ),
        rearrange=with_fused_experts,
    )
    with pytest.raises(
        EngineStartError,
        match=r"blk\.1\.ffn_up_exps\.weight and blk\.1\.ffn_gate_up_exps\.weight have the same",
    ):
        loaded(file, tmp_path / "model")


def test_other_widths_are_refused(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2})
    file = write_model(
        tmp_path / "m.gguf",
        model,
        lambda writer: writer.add_expert_feed_forward_length(31),
        rearrange=with_fused_experts,
    )
    with pytest.raises(EngineStartError, match=r"gate_up_exps\.weight has the shape \[5, 64, 64\]"):
        model_config(read_header(file))
