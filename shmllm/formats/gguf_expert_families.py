"""The families of models with experts in GGUF files that run; see `gguf_families.py`."""

from __future__ import annotations

from shmllm.formats.gguf_family import GgufFamily
from shmllm.formats.gguf_places import (
    AFMOE,
    BAILING,
    DEEPSEEK2,
    DOTS1,
    ERNIE_MOE,
    EXAONE_MOE,
    EXPERTS,
    GEMMA4,
    GLM4_MOE,
    GPT_OSS,
    GRANITE_MOE,
    HUNYUAN_MOE,
    LLAMA4,
    MINIMAX,
    MIXTRAL,
    OUTSIDE_BAILING,
    OUTSIDE_PER_LAYER,
    QK_NORMS,
    QWEN2_MOE,
)

WITH_EXPERTS: dict[tuple[str, bool], GgufFamily] = {
    ("llama", True): GgufFamily(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        modules=MIXTRAL,
        is_permuted=True,
    ),
    # llama.cpp has chunks of 8,192 positions, whatever a file says, and norms of queries and keys
    # but in models of 128 experts.
    ("llama4", True): GgufFamily(
        title="Llama 4",
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        modules=LLAMA4,
        also=("Llama4ForConditionalGeneration",),
    ),
    ("qwen2moe", True): GgufFamily(
        title="Qwen 2 MoE",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        modules=QWEN2_MOE,
        needs_head=True,
    ),
    ("qwen3moe", True): GgufFamily(
        title="Qwen 3 MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        modules={**EXPERTS, **QK_NORMS},
    ),
    ("gemma4", True): GgufFamily(
        title="Gemma 4 with experts",
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        modules=GEMMA4,
        outside=OUTSIDE_PER_LAYER,
        has_own_widths=True,
        is_written=False,
    ),
    ("qwen3vlmoe", True): GgufFamily(
        title="the language model of Qwen 3 VL with experts",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        modules={**EXPERTS, **QK_NORMS},
        is_written=False,
    ),
    ("granitemoe", True): GgufFamily(
        title="Granite MoE",
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        modules=GRANITE_MOE,
        is_permuted=True,
        also=("GraniteMoeSharedForCausalLM",),
    ),
    ("hunyuan-moe", True): GgufFamily(
        title="Hunyuan 1 with experts",
        architecture="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        modules=HUNYUAN_MOE,
    ),
    ("olmoe", True): GgufFamily(
        title="OLMoE",
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        modules={**EXPERTS, **QK_NORMS},
        needs_head=True,
    ),
    ("glm4moe", True): GgufFamily(
        title="GLM-4.5",
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        modules=GLM4_MOE,
        is_partial=True,
        is_written=False,
    ),
    ("deepseek2", True): GgufFamily(
        title="DeepSeek V2 and V3",
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        modules=DEEPSEEK2,
        has_latents=True,
        is_written=False,
    ),
    # llama.cpp reads experts in every layer behind the first ones, whatever the interval.
    ("ernie4_5-moe", True): GgufFamily(
        title="ERNIE 4.5 MoE",
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        modules=ERNIE_MOE,
    ),
    ("exaone-moe", True): GgufFamily(
        title="K-EXAONE",
        architecture="ExaoneMoeForCausalLM",
        model_type="exaone_moe",
        modules=EXAONE_MOE,
        needs_head=True,
    ),
    ("dots1", True): GgufFamily(
        title="dots.llm1",
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        modules=DOTS1,
        needs_head=True,
    ),
    ("bailingmoe2", True): GgufFamily(
        title="Ling 2.0",
        architecture="BailingMoeV2ForCausalLM",
        model_type="bailing_moe_v2",
        modules=BAILING,
        outside=OUTSIDE_BAILING,
        is_partial=True,
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
    ("gpt-oss", True): GgufFamily(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        modules=GPT_OSS,
        needs_head=True,
    ),
}
