"""The families of models in GGUF files that run. A family is a row of FAMILIES.

The names on one side are llama.cpp's, on the other transformers'. This module must not know the
fields of config.json, nor import torch.
"""

from __future__ import annotations

import re

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_family import OUTSIDE, GgufFamily
from shmllm.formats.gguf_places import (
    AFMOE,
    ATTENTION,
    DENSE,
    ERNIE_MOE,
    EXAONE_MOE,
    EXPERTS,
    GEMMA,
    GLM4,
    GPT2,
    GPT_OSS,
    GPTNEOX,
    GRANITE_MOE,
    HUNYUAN_MOE,
    HUNYUAN_NORMS,
    LFM2,
    LFM2_MOE,
    MINIMAX,
    MIXTRAL,
    MLP,
    OLMO2,
    OUTSIDE_LFM2,
    PHI2,
    PHI3,
    QK_NORMS,
    QWEN2_MOE,
    SEED_OSS,
    STARCODER2,
    UNGATED,
)

_LAYER = re.compile(r"blk\.(\d+)\.")

FAMILIES: dict[tuple[str, bool], GgufFamily] = {
    ("llama", False): GgufFamily(
        title="Llama and Mistral",
        architecture="LlamaForCausalLM",
        model_type="llama",
        modules=DENSE,
        is_permuted=True,
        also=("MistralForCausalLM",),
    ),
    ("llama", True): GgufFamily(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        modules=MIXTRAL,
        is_permuted=True,
    ),
    ("qwen2", False): GgufFamily(
        title="Qwen 2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        modules=DENSE,
    ),
    ("qwen2moe", True): GgufFamily(
        title="Qwen 2 MoE",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        modules=QWEN2_MOE,
        needs_head=True,
    ),
    ("qwen3", False): GgufFamily(
        title="Qwen 3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        modules={**DENSE, **QK_NORMS},
    ),
    ("qwen3moe", True): GgufFamily(
        title="Qwen 3 MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        modules={**EXPERTS, **QK_NORMS},
    ),
    ("qwen3vl", False): GgufFamily(
        title="the language model of Qwen 3 VL",
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl_text",
        modules={**DENSE, **QK_NORMS},
    ),
    ("mistral3", False): GgufFamily(
        title="Mistral 3 and Ministral 3",
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        modules=DENSE,
        is_permuted=True,
        also=("Mistral3ForConditionalGeneration",),
    ),
    ("gemma", False): GgufFamily(
        title="Gemma 1",
        architecture="GemmaForCausalLM",
        model_type="gemma",
        modules=DENSE,
        norm_offset=1.0,
    ),
    ("gemma2", False): GgufFamily(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        modules=GEMMA,
        norm_offset=1.0,
    ),
    ("gemma3", False): GgufFamily(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        modules={**GEMMA, **QK_NORMS},
        norm_offset=1.0,
        also=("Gemma3ForConditionalGeneration",),
    ),
    ("phi2", False): GgufFamily(
        title="Phi 1 and 2",
        architecture="PhiForCausalLM",
        model_type="phi",
        modules=PHI2,
        outside={**OUTSIDE, "output_norm": "model.final_layernorm"},
        is_partial=True,
        needs_head=True,
    ),
    ("phi3", False): GgufFamily(
        title="Phi 3 and 4",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        modules=PHI3,
        is_partial=True,
    ),
    ("granite", False): GgufFamily(
        title="Granite",
        architecture="GraniteForCausalLM",
        model_type="granite",
        modules=DENSE,
        is_permuted=True,
    ),
    ("granitemoe", True): GgufFamily(
        title="Granite MoE",
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        modules=GRANITE_MOE,
        is_permuted=True,
        also=("GraniteMoeSharedForCausalLM",),
    ),
    ("smollm3", False): GgufFamily(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        modules=DENSE,
        is_permuted=True,
    ),
    ("hunyuan-dense", False): GgufFamily(
        title="Hunyuan 1",
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        modules={**DENSE, **HUNYUAN_NORMS},
    ),
    ("hunyuan-moe", True): GgufFamily(
        title="Hunyuan 1 with experts",
        architecture="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        modules=HUNYUAN_MOE,
    ),
    ("olmo", False): GgufFamily(
        title="OLMo 1",
        architecture="OlmoForCausalLM",
        model_type="olmo",
        modules={
            **{module: at for module, at in ATTENTION.items() if module != "attn_norm"},
            **MLP,
        },
        outside={module: at for module, at in OUTSIDE.items() if module != "output_norm"},
        is_permuted=True,
    ),
    ("olmo2", False): GgufFamily(
        title="OLMo 2 and 3",
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        modules=OLMO2,
        needs_head=True,
        also=("Olmo3ForCausalLM",),
    ),
    ("olmoe", True): GgufFamily(
        title="OLMoE",
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        modules={**EXPERTS, **QK_NORMS},
        needs_head=True,
    ),
    ("glm4", False): GgufFamily(
        title="GLM-4",
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        modules=GLM4,
        is_partial=True,
    ),
    ("arcee", False): GgufFamily(
        title="Arcee",
        architecture="ArceeForCausalLM",
        model_type="arcee",
        modules=UNGATED,
        is_permuted=True,
    ),
    ("ernie4_5", False): GgufFamily(
        title="ERNIE 4.5",
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        modules=DENSE,
    ),
    # llama.cpp reads experts in every layer behind the first ones, whatever the interval.
    ("ernie4_5-moe", True): GgufFamily(
        title="ERNIE 4.5 MoE",
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        modules=ERNIE_MOE,
    ),
    ("exaone4", False): GgufFamily(
        title="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        modules=OLMO2,
    ),
    ("exaone-moe", True): GgufFamily(
        title="K-EXAONE",
        architecture="ExaoneMoeForCausalLM",
        model_type="exaone_moe",
        modules=EXAONE_MOE,
        needs_head=True,
    ),
    ("minimax-m2", True): GgufFamily(
        title="MiniMax M2",
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        modules=MINIMAX,
        is_partial=True,
        needs_head=True,
    ),
    # llama.cpp scales the embeddings and rotates all but every fourth layer, whatever a file says.
    ("afmoe", True): GgufFamily(
        title="AFMoE",
        architecture="AfmoeForCausalLM",
        model_type="afmoe",
        modules=AFMOE,
    ),
    ("seed_oss", False): GgufFamily(
        title="Seed-OSS",
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        modules=SEED_OSS,
    ),
    ("starcoder2", False): GgufFamily(
        title="StarCoder 2",
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        modules=STARCODER2,
    ),
    ("nemotron", False): GgufFamily(
        title="Nemotron",
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        modules=UNGATED,
        is_partial=True,
        norm_offset=1.0,
        needs_head=True,
    ),
    ("gptneox", False): GgufFamily(
        title="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        modules=GPTNEOX,
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
        modules=DENSE,
        is_partial=True,
        needs_head=True,
    ),
    ("command-r", False): GgufFamily(
        title="Cohere",
        architecture="CohereForCausalLM",
        model_type="cohere",
        modules={**ATTENTION, **MLP},
    ),
    ("cohere2", False): GgufFamily(
        title="Cohere 2",
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        modules={**ATTENTION, **MLP},
    ),
    ("lfm2", False): GgufFamily(
        title="LFM2",
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        modules=LFM2,
        outside=OUTSIDE_LFM2,
        is_hybrid=True,
    ),
    ("lfm2moe", True): GgufFamily(
        title="LFM2 MoE",
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        modules=LFM2_MOE,
        outside=OUTSIDE_LFM2,
        is_hybrid=True,
    ),
    ("gpt-oss", True): GgufFamily(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        modules=GPT_OSS,
        needs_head=True,
    ),
    ("gpt2", False): GgufFamily(
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        modules=GPT2,
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


def layers_of(header: GgufHeader) -> tuple[int, int]:
    """Returns the number of layers of a file's model, and how many behind these predict further
    tokens.

    Raises:
        EngineStartError: the metadata do not say it.
    """
    name, known = header.architecture, header.metadata
    count, further = known.get(f"{name}.block_count"), known.get(f"{name}.nextn_predict_layers", 0)
    if type(count) is not int or type(further) is not int or not 0 <= further < count:
        raise header.error(
            f"{name}.block_count must be a positive whole number above nextn_predict_layers; found "
            f"{shown(count)} and {shown(further)}"
        )
    return count - further, further


def further_prefixes(header: GgufHeader) -> tuple[str, ...]:
    """Returns what the names of the tensors begin with that predict further tokens."""
    if not header.metadata.get(f"{header.architecture}.nextn_predict_layers"):
        return ()
    count, further = layers_of(header)
    numbers = {match[1] for match in map(_LAYER.match, header.tensors) if match is not None}
    return tuple(f"blk.{each}." for each in numbers if 0 <= int(each) - count < further)


def family_of_class(architecture: str) -> tuple[str, GgufFamily] | None:
    """Returns llama.cpp's architecture and the family of one of transformers' classes; None if no
    file can have such a model."""
    for (name, _), family in FAMILIES.items():
        if architecture in (family.architecture, *family.also):
            return name, family
    return None
