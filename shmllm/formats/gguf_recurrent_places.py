"""Where a checkpoint has what a layer of a GGUF file has, of families with recurrent states.

The names on one side are llama.cpp's, on the other transformers'; `gguf_recurrent_families.py` says
which families have which. This module must not import torch.
"""

from __future__ import annotations

from shmllm.formats.gguf_family import OUTSIDE, Place, Places
from shmllm.formats.gguf_places import (
    ATTENTION,
    GRANITE_MOE,
    MLP,
    QK_NORMS,
    QWEN2_MOE,
    experts,
    fused_qkv,
    gated_mlp,
    halves,
    numbered_mlp,
    qkv,
    without,
)


def _mamba2(name: str) -> Places:
    """The places of a Mamba 2, which a checkpoint has below this name."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": Place(name=f"{name}.conv1d", layout="channels"),
        "ssm_a": Place(name=f"{name}.A_log", layout="flat", is_decay=True),
        "ssm_d": Place(name=f"{name}.D", layout="flat"),
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_norm": Place(name=f"{name}.norm", layout="flat", num_rows="ssm.group_count"),
        "ssm_out": f"{name}.out_proj",
    }


def _mamba(name: str) -> Places:
    """The places of a Mamba, which a checkpoint has below this name."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": Place(name=f"{name}.conv1d", layout="channels"),
        "ssm_x": f"{name}.x_proj",
        "ssm_dt": f"{name}.dt_proj",
        "ssm_a": Place(name=f"{name}.A_log", is_decay=True),
        "ssm_d": f"{name}.D",
        "ssm_out": f"{name}.out_proj",
    }


MAMBA: Places = {"attn_norm": "norm", **_mamba("mixer")}
MAMBA2: Places = {"attn_norm": "norm", **_mamba2("mixer")}
OUTSIDE_MAMBA = {
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "output": "lm_head",
}
JAMBA: Places = {
    **ATTENTION,
    **_mamba("mamba"),
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **gated_mlp("ffn_{}", "feed_forward"),
    "ffn_gate_inp": "feed_forward.router",
    **experts(gated_mlp("ffn_{}_exps", "feed_forward.experts.{}")),
}
OUTSIDE_JAMBA = {**OUTSIDE, "output_norm": "model.final_layernorm"}
GRANITE_HYBRID: Places = {
    **ATTENTION,
    **_mamba2("mamba"),
    "ffn_norm": "post_attention_layernorm",
    **halves("ffn_{}", "shared_mlp.input_linear"),
    "ffn_down": "shared_mlp.output_linear",
}
GRANITE_HYBRID_MOE: Places = {**GRANITE_MOE, **_mamba2("mamba")}
FALCON_H1: Places = {
    **ATTENTION,
    **_mamba2("mamba"),
    "ffn_norm": "pre_ff_layernorm.weight",
    **gated_mlp("ffn_{}", "feed_forward"),
}
NEMOTRON_H: Places = {
    "attn_norm": "norm",
    **qkv("mixer.{}_proj"),
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    **_mamba2("mixer"),
}
GATED_QKV = fused_qkv("self_attn.{}_proj", num_query_parts=2)
"""Each head of queries has a gate of the same width."""
DELTA_NETS: Places = {
    **ATTENTION,
    **QK_NORMS,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": Place(name="linear_attn.conv1d", layout="channels"),
    "ssm_a": Place(name="linear_attn.A_log", is_decay=True),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
QWEN35: Places = {**DELTA_NETS, **MLP}
QWEN35_MOE: Places = {
    **DELTA_NETS,
    **{module: place for module, place in QWEN2_MOE.items() if module.startswith("ffn_")},
}
QWEN3_NEXT: Places = {
    **without(QWEN35_MOE, "ssm_beta", "ssm_alpha"),
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # in place of attn_qkv and attn_gate, in the first files
}
LFM2: Places = {
    "attn_norm": "operator_norm",
    **qkv("self_attn.{}_proj"),
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": Place(name="conv.conv", layout="channels"),
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    **numbered_mlp("ffn_{}", "feed_forward"),
}
LFM2_MOE: Places = {
    **LFM2,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **experts(numbered_mlp("ffn_{}_exps", "feed_forward.experts.{}")),
}
OUTSIDE_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # so it is called there
    "output": "lm_head",
}
