"""The families of models in GGUF files that run. A family is a row of FAMILIES.

The names on one side are llama.cpp's, on the other transformers'. This module must not know the
fields of config.json, nor import torch.
"""

from __future__ import annotations

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_family import OUTSIDE, GgufFamily, Place, Places

_ATTENTION: Places = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS: Places = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP: Places = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_MLP: Places = {
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE: Places = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA: Places = {
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Places = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL: Places = {
    **_EXPERTS,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN2_MOE: Places = {
    **_EXPERTS,
    "ffn_gate_inp_shexp": Place(name="mlp.shared_expert_gate", layout="row"),
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GATE_UP = Place(name="mlp.experts.gate_up_proj", layout="transposed", num_parts=2)
_GATE_UP_BIAS = Place(name="mlp.experts.gate_up_proj_bias", num_parts=2)
_GPT_OSS: Places = {
    **_ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": _GATE_UP,
    "ffn_gate_exps.bias": _GATE_UP_BIAS,
    "ffn_up_exps.weight": Place(name=_GATE_UP.name, layout="transposed", part=1, num_parts=2),
    "ffn_up_exps.bias": Place(name=_GATE_UP_BIAS.name, part=1, num_parts=2),
    "ffn_down_exps.weight": Place(name="mlp.experts.down_proj", layout="transposed"),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_OLMO2: Places = {
    **{module: at for module, at in _ATTENTION.items() if module != "attn_norm"},
    **_QK_NORMS,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_UNGATED: Places = {module: at for module, at in _DENSE.items() if module != "ffn_gate"}
_GPTNEOX: Places = {
    "attn_norm": "input_layernorm",
    "attn_qkv": Place(name="attention.query_key_value", layout="heads"),
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_PHI2: Places = {
    **_ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_STARCODER2: Places = {**_UNGATED, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_SEED_OSS: Places = {**_ATTENTION, "post_attention_norm": "post_attention_layernorm", **_MLP}
_PHI3: Places = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **_FUSED_MLP,
}
_GLM4: Places = {
    **_ATTENTION,
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **_FUSED_MLP,
    "post_ffw_norm": "post_mlp_layernorm",
}
_LFM2: Places = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": Place(name="conv.conv", layout="channels"),
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE: Places = {
    **_LFM2,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_OUTSIDE_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # so it is called there
    "output": "lm_head",
}
_GPT2: Places = {
    "attn_norm": "ln_1",
    "attn_qkv": Place(name="attn.c_attn", layout="transposed"),
    "attn_output": Place(name="attn.c_proj", layout="transposed"),
    "ffn_norm": "ln_2",
    "ffn_up": Place(name="mlp.c_fc", layout="transposed"),
    "ffn_down": Place(name="mlp.c_proj", layout="transposed"),
}

FAMILIES: dict[tuple[str, bool], GgufFamily] = {
    ("llama", False): GgufFamily(
        title="Llama and Mistral",
        architecture="LlamaForCausalLM",
        model_type="llama",
        modules=_DENSE,
        is_permuted=True,
        also=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    ),
    ("llama", True): GgufFamily(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        modules=_MIXTRAL,
        is_permuted=True,
    ),
    ("qwen2", False): GgufFamily(
        title="Qwen 2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        modules=_DENSE,
    ),
    ("qwen2moe", True): GgufFamily(
        title="Qwen 2 MoE",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        modules=_QWEN2_MOE,
        needs_head=True,
    ),
    ("qwen3", False): GgufFamily(
        title="Qwen 3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        modules={**_DENSE, **_QK_NORMS},
    ),
    ("qwen3moe", True): GgufFamily(
        title="Qwen 3 MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        modules={**_EXPERTS, **_QK_NORMS},
    ),
    ("qwen3vl", False): GgufFamily(
        title="the language model of Qwen 3 VL",
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl_text",
        modules={**_DENSE, **_QK_NORMS},
    ),
    ("gemma", False): GgufFamily(
        title="Gemma 1",
        architecture="GemmaForCausalLM",
        model_type="gemma",
        modules=_DENSE,
        norm_offset=1.0,
    ),
    ("gemma2", False): GgufFamily(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        modules=_GEMMA,
        norm_offset=1.0,
    ),
    ("gemma3", False): GgufFamily(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        modules={**_GEMMA, **_QK_NORMS},
        norm_offset=1.0,
        also=("Gemma3ForConditionalGeneration",),
    ),
    ("phi2", False): GgufFamily(
        title="Phi 1 and 2",
        architecture="PhiForCausalLM",
        model_type="phi",
        modules=_PHI2,
        outside={**OUTSIDE, "output_norm": "model.final_layernorm"},
        is_partial=True,
        needs_head=True,
    ),
    ("phi3", False): GgufFamily(
        title="Phi 3 and 4",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        modules=_PHI3,
        is_partial=True,
    ),
    ("granite", False): GgufFamily(
        title="Granite",
        architecture="GraniteForCausalLM",
        model_type="granite",
        modules=_DENSE,
        is_permuted=True,
    ),
    ("smollm3", False): GgufFamily(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        modules=_DENSE,
        is_permuted=True,
    ),
    ("olmo", False): GgufFamily(
        title="OLMo 1",
        architecture="OlmoForCausalLM",
        model_type="olmo",
        modules={
            **{module: at for module, at in _ATTENTION.items() if module != "attn_norm"},
            **_MLP,
        },
        outside={module: at for module, at in OUTSIDE.items() if module != "output_norm"},
        is_permuted=True,
    ),
    ("olmo2", False): GgufFamily(
        title="OLMo 2 and 3",
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        modules=_OLMO2,
        needs_head=True,
        also=("Olmo3ForCausalLM",),
    ),
    ("olmoe", True): GgufFamily(
        title="OLMoE",
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        modules={**_EXPERTS, **_QK_NORMS},
        needs_head=True,
    ),
    ("glm4", False): GgufFamily(
        title="GLM-4",
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        modules=_GLM4,
        is_partial=True,
    ),
    ("arcee", False): GgufFamily(
        title="Arcee",
        architecture="ArceeForCausalLM",
        model_type="arcee",
        modules=_UNGATED,
        is_permuted=True,
    ),
    ("ernie4_5", False): GgufFamily(
        title="ERNIE 4.5",
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        modules=_DENSE,
    ),
    ("exaone4", False): GgufFamily(
        title="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        modules=_OLMO2,
    ),
    ("seed_oss", False): GgufFamily(
        title="Seed-OSS",
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        modules=_SEED_OSS,
    ),
    ("starcoder2", False): GgufFamily(
        title="StarCoder 2",
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        modules=_STARCODER2,
    ),
    ("nemotron", False): GgufFamily(
        title="Nemotron",
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        modules=_UNGATED,
        is_partial=True,
        norm_offset=1.0,
        needs_head=True,
    ),
    ("gptneox", False): GgufFamily(
        title="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        modules=_GPTNEOX,
        outside={
            **OUTSIDE,
            "token_embd": "model.embed_in",
            "output_norm": "model.final_layer_norm",
        },
        is_partial=True,
        needs_head=True,
    ),
    ("stablelm", False): GgufFamily(
        title="StableLM",
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        modules=_DENSE,
        is_partial=True,
        needs_head=True,
    ),
    ("command-r", False): GgufFamily(
        title="Cohere",
        architecture="CohereForCausalLM",
        model_type="cohere",
        modules={**_ATTENTION, **_MLP},
    ),
    ("cohere2", False): GgufFamily(
        title="Cohere 2",
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        modules={**_ATTENTION, **_MLP},
    ),
    ("lfm2", False): GgufFamily(
        title="LFM2",
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        modules=_LFM2,
        outside=_OUTSIDE_LFM2,
        is_hybrid=True,
    ),
    ("lfm2moe", True): GgufFamily(
        title="LFM2 MoE",
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        modules=_LFM2_MOE,
        outside=_OUTSIDE_LFM2,
        is_hybrid=True,
    ),
    ("gpt-oss", True): GgufFamily(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        modules=_GPT_OSS,
        needs_head=True,
    ),
    ("gpt2", False): GgufFamily(
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        modules=_GPT2,
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
    ),
}
"""The families by llama.cpp's architecture, and whether the model has experts."""


def family_of(header: GgufHeader) -> GgufFamily:
    """Returns the family of a file's model.

    Raises:
        EngineStartError: the file has another model; the message names those that run.
    """
    name = header.architecture
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    if (name, has_experts) in FAMILIES:
        return FAMILIES[name, has_experts]
    kind = " with experts" if has_experts and (name, False) in FAMILIES else ""
    raise header.error(
        f"architecture {shown(name)}{kind} is not supported; supported: "
        f"{', '.join(dict.fromkeys(known for known, _ in FAMILIES))} "
        f"({', '.join(family.title for family in FAMILIES.values())})"
    )


def family_of_class(architecture: str) -> tuple[str, GgufFamily] | None:
    """Returns llama.cpp's architecture and the family of one of transformers' classes; None if no
    file can have such a model."""
    for (name, _), family in FAMILIES.items():
        if architecture in (family.architecture, *family.also):
            return name, family
    return None
