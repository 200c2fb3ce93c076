"""Each family from a GGUF file: its logits are transformers', whatever the matrices are stored in.

The files are those of `support.gguf_models`, which takes the names of the `gguf` package and stores
what llama.cpp's conversion stores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_cases import CASES, GPT_OSS, GRANITE_MOE, LONG, LONG_TENSOR
from support.gguf_loading import loaded
from support.gguf_models import KINDS, Change, quantized, stored_tensors, write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import (
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
)

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import model_config
from shmllm.models.gguf_tensors import stored_tensors as tensors_of
from shmllm.models.matrices import packed_of

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


@pytest.mark.parametrize("case", CASES)
def test_its_logits_are_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    family, options, change = CASES[case]
    reference = reference_model(family, scale=4.0, **options)
    file = write_model(tmp_path / "m.gguf", reference, change)
    model = loaded(file, tmp_path / "model")
    if (
        case == "phi3 longrope"
    ):  # transformers takes the short factors for a short text, an engine never does
        reference.config.rope_parameters["short_factor"] = LONG["long_factor"]
        long = type(reference)(reference.config).eval()
        long.load_state_dict(reference.state_dict())
        reference = long
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


WIDE: dict[str, dict[str, Any]] = {
    "granite_moe_shared": GRANITE_MOE
    | {"hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 32}
    | {"num_attention_heads": 4, "num_hidden_layers": 2},
    "gpt_oss": GPT_OSS | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "gpt2": {"n_inner": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "phi3": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt_oss", "MXFP4"), ("gpt_oss", "Q8_0"), ("gpt2", "Q8_0"), ("gpt2", "Q4_0"),
     ("phi3", "Q8_0"), ("granite_moe_shared", "Q8_0"), ("granite_moe_shared", "Q4_0")],
)  # fmt: skip
def test_joined_and_transposed_matrices_stay_packed(family: str, kind: str, tmp_path: Path) -> None:
    reference = reference_model(family, **WIDE[family])
    model = loaded(write_model(tmp_path / "m.gguf", reference, kind=kind), tmp_path / "model")
    stored = {name: values for name, _, values in stored_tensors(reference)}
    every = model.destinations()
    num_packed = 0
    for target, names in joined_names(family, stored).items():
        view = every[target][0]
        assert packed_of(view) is not None, target
        parts = [dequantized(stored[name], kind) for name in names]
        if family == "gpt_oss" and len(parts) > 1:
            joined = np.stack(parts, 2).reshape(len(parts[0]), -1, parts[0].shape[-1])
        else:
            joined = np.concatenate(parts, -2)
        expected = torch.from_numpy(joined)
        is_same = family in ("phi3", "granite_moe_shared")
        assert torch.equal(view.clone(), expected if is_same else expected.transpose(-1, -2))
        num_packed += 1
    assert num_packed == {"gpt_oss": 4, "gpt2": 8, "phi3": 12, "granite_moe_shared": 8}[family]


def dequantized(values: Any, kind: str) -> Any:
    return gguf.quants.dequantize(quantized(values, kind), KINDS[kind])


GRANITE_NAMES = {
    "mlp.shared_experts.gate_proj.weight": "shared_mlp.input_linear.weight",
    "mlp.shared_experts.up_proj.weight": "shared_mlp.input_linear.weight",
    "shared_mlp.output_linear.weight": "shared_mlp.output_linear.weight",
    "block_sparse_moe.experts.gate_proj.weight": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.up_proj.weight": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj.weight": "block_sparse_moe.output_linear.weight",
}
"""The names in a checkpoint of what `stored_tensors` names, below a layer."""


def joined_names(family: str, stored: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the layers' matrices in a checkpoint, and of what the file has of each."""
    found: dict[str, list[str]] = {}
    for name, values in stored.items():
        if family == "granite_moe_shared":
            *layer, module = name.split(".", 3)
            if module in GRANITE_NAMES:
                found.setdefault(".".join([*layer, GRANITE_NAMES[module]]), []).append(name)
        elif family != "gpt_oss":
            if values.ndim == 2 and (".h." in name or "layers" in name):
                found[name] = [name]
        elif values.ndim == 3:
            target = name.removesuffix(".weight").replace("gate_proj", "gate_up_proj")
            target = target.replace(".up_proj", ".gate_up_proj")
            found.setdefault(target, []).append(name)
    return found


def test_parts_of_a_tensor_may_be_in_different_pieces(tmp_path: Path) -> None:
    reference = reference_model("gpt_oss", **WIDE["gpt_oss"])
    whole = loaded(write_model(tmp_path / "m.gguf", reference, kind="MXFP4"), tmp_path / "one")
    (tmp_path / "cut").mkdir()
    write_model(tmp_path / "cut" / "m.gguf", reference, kind="MXFP4", max_tensors=1)
    pieces = sorted((tmp_path / "cut").iterdir())
    assert any(
        len({part.path for part in each.parts}) > 1 for each in tensors_of(tuple(pieces)).values()
    )
    cut = loaded(pieces[0], tmp_path / "several").destinations()
    for name, (view, *_) in whole.destinations().items():
        assert torch.equal(cut[name][0].clone(), view.clone()), name


def test_a_gate_without_its_up_is_named(tmp_path: Path) -> None:
    reference = reference_model("gpt_oss", **WIDE["gpt_oss"])
    file = write_model(tmp_path / "m.gguf", reference)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_xx_exps.weight"))
    with pytest.raises(
        EngineStartError, match=r"blk\.1\.ffn_gate_exps\.weight without .*ffn_up_exps\.weight"
    ):
        loaded(file, tmp_path / "model")


def test_a_branch_without_a_matrix_is_named(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", reference_model("gemma3n", **OPTIONS["gemma3n"]))
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.0.laurel_l.weight", b"blk.0.laurel_x.weight"))
    with pytest.raises(EngineStartError, match=r"no matrix blk\.0\.laurel_l\.weight"):
        model_config(read_header(file))


SOFTMAX = gguf.ExpertGatingFuncType.SOFTMAX
OPTIONS = {
    CASES[case][0]: CASES[case][1]
    for case in (
        "llama4",
        "qwen2_moe",
        "olmoe",
        "ernie4.5 with experts",
        "exaone with experts",
        "minimax m2",
    )
} | {
    "afmoe": CASES["afmoe"][1],
    "gemma3n": {"head_dim": 16, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3}
    | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16},
    "gemma4": {"head_dim": 16, "hidden_size_per_layer_input": 0},
}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("granite", lambda w: w.add_bool("granite.rope.scaling.finetuned", False), "without rot"),
        ("granite", lambda w: w.add_sliding_window(9), "window of 9 positions is not supported"),
        ("olmo3", lambda w: w.add_rope_freq_base_swa(77.0), r"freq_base_swa 77\.0 beside"),
        (
            "glm4",
            lambda w: w.add_rope_dimension_sections([2, 1, 1, 0]),
            "dimension_sections is not",
        ),
        ("olmoe", lambda w: w.add_clamp_kqv(3.0), "clamp_kqv is not supported"),
        ("phi3", lambda w: w.add_head_count_kv(3), r"attn_qkv\.weight has the shape \[80, 48\]"),
        ("phi3", lambda w: w.add_feed_forward_length(7), r"ffn_up\.weight has the shape \[160"),
        ("phi3", lambda w: w.add_tensor(LONG_TENSOR, np.ones(4, np.float32)), "rope_factors_short"),
        ("gpt2", lambda w: w.add_context_length(999), r"position_embd\.weight has the shape"),
        ("qwen2_moe", lambda w: w.add_expert_shared_feed_forward_length(7), "ffn_up_shexp"),
        (
            "ernie4_5_moe",
            lambda w: w.add_expert_count(7),
            r"blk\.1\.ffn_gate_inp\.weight has the sh",
        ),
        (
            "ernie4_5_moe",
            lambda w: w.add_expert_shared_feed_forward_length(25),
            "expert_shared_feed_forward_length 25 is no multiple of 24",
        ),
        ("llama4", lambda w: w.add_sliding_window(0), "without chunks"),
        ("llama4", lambda w: w.add_rope_freq_base_swa(77.0), r"freq_base_swa 77\.0 beside"),
        ("exaone_moe", lambda w: w.add_nextn_predict_layers(5), "above nextn_predict_layers"),
        ("minimax_m2", lambda w: w.add_expert_gating_func(SOFTMAX), "not chosen by sigmoids"),
        ("afmoe", lambda w: w.add_expert_weights_norm(False), "without expert_weights_norm"),
        ("afmoe", lambda w: w.add_expert_group_count(2), "groups of experts"),
        ("afmoe", lambda w: w.add_rope_freq_base_swa(77.0), r"freq_base_swa 77\.0 beside"),
        ("gemma3n", lambda w: w.add_activation_sparsity_scale([1.6]), "sparsity_scale must have a"),
        ("gemma3n", lambda w: w.add_altup_num_inputs(0), "altup.num_inputs"),
        (
            "gemma4",
            lambda w: w.add_feed_forward_length([80, 80, 96]),
            "feed_forward_length.*is not",
        ),
        ("gemma4", lambda w: w.add_rope_dimension_count_swa(8), "dimension_count_swa 8 beside"),
        ("gemma4", lambda w: w.add_head_count_kv([2, 2]), "a number for each layer"),
        ("gemma4", lambda w: w.add_shared_kv_layers(2**31), "shared_kv_layers must be below 3"),
        ("gemma4", lambda w: w.add_sliding_window_pattern([True]), "pattern has 1 layers of 3"),
        ("qwen2_moe", lambda w: w.add_uint32("qwen2moe.expert_weights_norm", 1), "true or false"),
    ],
)
def test_what_no_engine_computes_is_refused(
    family: str, change: Change, message: str, tmp_path: Path
) -> None:
    options = OPTIONS.get(family, {})
    file = write_model(tmp_path / "m.gguf", reference_model(family, **options), change)
    with pytest.raises(EngineStartError, match=message) as caught:
        model_config(read_header(file))
    assert "\n" not in str(caught.value)


def test_value_heads_in_turn_take_no_update_in_a_checkpoints_order(tmp_path: Path) -> None:
    """Other ones have the names of a checkpoint."""
    for case, name in (
        ("qwen3.5", "linear_attn"),
        ("qwen3.5 with value heads in turn", "linear_attn_tiled"),
    ):
        family, options = READ_ALONE[case]
        file = write_model(tmp_path / f"{name}.gguf", reference_model(family, **options))
        names = loaded(file, tmp_path / name).named_weights()
        found = {each.split(".")[3] for each in names if each.endswith(".A_log")}
        assert found == {name}
