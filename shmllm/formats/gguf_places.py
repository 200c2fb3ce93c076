"""Where a checkpoint has what a layer of a GGUF file has: a table for each kind of layers.

The names on one side are llama.cpp's, on the other transformers'; `gguf_families.py` says which
families have which. This module must not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.formats.gguf_family import (
    NUM_HEADS,
    NUM_KV_HEADS,
    OUTSIDE,
    HeadRows,
    Place,
    Places,
    as_place,
)

FUSED_EXPERTS = "ffn_gate_up_exps"
"""The module of gates and ups of all experts in one tensor, [experts, 2 * width, in]."""
FUSED_QKV = "attn_qkv"
"""The module of queries, keys and values in one tensor, [q rows + k rows + v rows, in]."""


def without(places: Places, *modules: str) -> Places:
    """The places of all other modules."""
    return {module: at for module, at in places.items() if module not in modules}


def fused_qkv(name: str, num_query_parts: int = 1) -> Places:
    """Queries above keys above values in one tensor, which a checkpoint has under this name."""
    queries, *others = (name.format(kind) for kind in "qkv")
    heads = HeadRows(NUM_HEADS, num_query_parts), HeadRows(NUM_KV_HEADS), HeadRows(NUM_KV_HEADS)
    place = Place(name=queries, others=tuple(others), heads=heads, is_read_alone=True)
    return {FUSED_QKV: place}


def qkv(name: str) -> Places:
    """Queries, keys and values, which a checkpoint has under this name. A file may also have them
    in one tensor."""
    return {**{f"attn_{kind}": name.format(kind) for kind in "qkv"}, **fused_qkv(name)}


def gated_mlp(modules: str, name: str) -> Places:
    """The gate, up and down of an MLP or of experts, which a checkpoint has under this name."""
    return {modules.format(kind): f"{name}.{kind}_proj" for kind in ("gate", "up", "down")}


def numbered_mlp(modules: str, name: str) -> Places:
    """The same, from a checkpoint that calls them w1, w3 and w2."""
    kinds = {"gate": "w1", "up": "w3", "down": "w2"}
    return {modules.format(kind): f"{name}.{number}" for kind, number in kinds.items()}


def experts(places: Places) -> Places:
    """The gates, ups and downs of experts. A file may also have the gate of each expert above its
    up in one tensor."""
    gate, up = (as_place(places[f"ffn_{kind}_exps"]).name for kind in ("gate", "up"))
    return {**places, FUSED_EXPERTS: Place(name=gate, others=(up,), is_read_alone=True)}


def halves(modules: str, name: str) -> Places:
    """The modules of gates and ups, which a checkpoint has in one matrix, one below the other."""
    return {
        modules.format(kind): Place(name=name, part=part, num_parts=2, in_turn=False)
        for part, kind in enumerate(("gate", "up"))
    }


ATTENTION: Places = {
    "attn_norm": "input_layernorm",
    **qkv("self_attn.{}_proj"),
    "attn_output": "self_attn.o_proj",
}
QK_NORMS: Places = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
HUNYUAN_NORMS: Places = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
MLP: Places = gated_mlp("ffn_{}", "mlp")
FUSED_MLP: Places = {
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
DENSE: Places = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **MLP}
STABLELM: Places = {
    **DENSE,
    "attn_q_norm": "self_attn.q_layernorm.norms.{}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}
GEMMA: Places = {
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PER_LAYER: Places = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N: Places = {
    **GEMMA,
    **QK_NORMS,
    **PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA4: Places = {
    **GEMMA,
    **QK_NORMS,
    **PER_LAYER,
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": Place(name="experts.gate_up_proj", num_parts=2, in_turn=False),
    "ffn_up_exps.weight": Place(name="experts.gate_up_proj", part=1, num_parts=2, in_turn=False),
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
OUTSIDE_PER_LAYER = {
    **OUTSIDE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
OUTSIDE_GEMMA3N = {
    **OUTSIDE_PER_LAYER,
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
EXPERTS: Places = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **experts(gated_mlp("ffn_{}_exps", "mlp.experts.{}")),
}
MIXTRAL: Places = {
    **EXPERTS,
    "ffn_gate_inp": "block_sparse_moe.gate",
    **experts(numbered_mlp("ffn_{}_exps", "block_sparse_moe.experts.{}")),
}
QWEN2_MOE: Places = {
    **EXPERTS,
    "ffn_gate_inp_shexp": Place(name="mlp.shared_expert_gate", layout="row"),
    **gated_mlp("ffn_{}_shexp", "mlp.shared_expert"),
}
GRANITE_MOE: Places = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **halves("ffn_{}_exps", "block_sparse_moe.input_linear"),
    FUSED_EXPERTS: Place(name="block_sparse_moe.input_linear", is_read_alone=True),
    "ffn_down_exps": "block_sparse_moe.output_linear",
    **halves("ffn_{}_shexp", "shared_mlp.input_linear"),
    "ffn_down_shexp": "shared_mlp.output_linear",
}
HUNYUAN_MOE: Places = {
    **EXPERTS,
    **HUNYUAN_NORMS,
    "ffn_gate_inp": "mlp.gate.wg",
    **gated_mlp("ffn_{}_shexp", "mlp.shared_mlp"),
}
SHARED_EXPERTS: Places = {
    **EXPERTS,
    **MLP,  # of the first layers
    **gated_mlp("ffn_{}_shexp", "mlp.shared_experts"),
}
ERNIE_MOE: Places = {
    **SHARED_EXPERTS,
    "exp_probs_b.bias": Place(name="mlp.moe_statics.e_score_correction_bias", layout="row"),
}
GLM4_MOE: Places = {
    **without(SHARED_EXPERTS, "ffn_norm"),
    **QK_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
LATENTS: Places = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_kv_b": "self_attn.kv_b_proj",  # in place of both, in the first files
}
DEEPSEEK2: Places = {
    **without(SHARED_EXPERTS, FUSED_QKV),
    **LATENTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
YOUTU: Places = {**without(DENSE, FUSED_QKV), **LATENTS}
MINICPM3: Places = without(YOUTU, *(f"attn_{kind}" for kind in ("q", "k", "v", "k_b", "v_b")))
DOTS1: Places = {
    **SHARED_EXPERTS,
    **QK_NORMS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
MIMO2: Places = {
    **without(EXPERTS, FUSED_QKV),
    **MLP,  # of the first layers
    "attn_sinks.weight": "self_attn.attention_sink_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
BAILING: Places = {
    **without(SHARED_EXPERTS, FUSED_QKV, "attn_q", "attn_k", "attn_v"),
    FUSED_QKV: "attention.query_key_value",
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "exp_probs_b.bias": Place(name="mlp.gate.expert_bias"),
}
OUTSIDE_BAILING = {**OUTSIDE, "token_embd": "model.word_embeddings"}
EXAONE_MOE: Places = {
    **SHARED_EXPERTS,
    **QK_NORMS,
    "exp_probs_b.bias": "mlp.e_score_correction_bias",
}
AFMOE: Places = {
    **SHARED_EXPERTS,
    **QK_NORMS,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}
MINIMAX: Places = {
    **MIXTRAL,
    **QK_NORMS,
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
GATE_UP = Place(name="mlp.experts.gate_up_proj", layout="transposed", num_parts=2)
GATE_UP_BIAS = Place(name="mlp.experts.gate_up_proj_bias", num_parts=2)
GPT_OSS: Places = {
    **ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": GATE_UP,
    "ffn_gate_exps.bias": GATE_UP_BIAS,
    "ffn_up_exps.weight": Place(name=GATE_UP.name, layout="transposed", part=1, num_parts=2),
    "ffn_up_exps.bias": Place(name=GATE_UP_BIAS.name, part=1, num_parts=2),
    "ffn_down_exps.weight": Place(name="mlp.experts.down_proj", layout="transposed"),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
GATE_UP_HALVES = replace(GATE_UP, name="feed_forward.experts.gate_up_proj", in_turn=False)
LLAMA4: Places = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    **gated_mlp("ffn_{}", "feed_forward"),
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps.weight": GATE_UP_HALVES,
    "ffn_up_exps.weight": replace(GATE_UP_HALVES, part=1),
    f"{FUSED_EXPERTS}.weight": replace(GATE_UP_HALVES, num_parts=1, is_read_alone=True),
    "ffn_down_exps.weight": Place(name="feed_forward.experts.down_proj", layout="transposed"),
    **gated_mlp("ffn_{}_shexp", "feed_forward.shared_expert"),
}
OLMO2: Places = {
    **without(ATTENTION, "attn_norm"),
    **QK_NORMS,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
UNGATED: Places = without(DENSE, "ffn_gate")
GPTNEOX: Places = {
    "attn_norm": "input_layernorm",
    "attn_qkv": Place(name="attention.query_key_value", layout="heads"),
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
FALCON: Places = {
    "attn_norm": "input_layernorm",
    "attn_qkv": Place(name="self_attention.query_key_value", layout="heads"),
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
BLOOM: Places = {**FALCON, "ffn_norm": "post_attention_layernorm"}
OUTSIDE_BLOOM = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
MPT: Places = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
OUTSIDE_MPT = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
}
FALCON_NORMS: Places = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
"""Those of models in which attention and MLP have a norm each."""
PHI2: Places = {
    **ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
STARCODER2: Places = {**UNGATED, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
SEED_OSS: Places = {**ATTENTION, "post_attention_norm": "post_attention_layernorm", **MLP}
PHI3: Places = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **FUSED_MLP,
}
GLM: Places = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **FUSED_MLP}
GLM4: Places = {
    **GLM,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
GPT2: Places = {
    "attn_norm": "ln_1",
    "attn_qkv": Place(name="attn.c_attn", layout="transposed"),
    "attn_output": Place(name="attn.c_proj", layout="transposed"),
    "ffn_norm": "ln_2",
    "ffn_up": Place(name="mlp.c_fc", layout="transposed"),
    "ffn_down": Place(name="mlp.c_proj", layout="transposed"),
}
STARCODER: Places = {
    **{module: as_place(at).name for module, at in GPT2.items()},
    "attn_qkv": Place(name="attn.c_attn", layout="heads"),
}
OUTSIDE_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
