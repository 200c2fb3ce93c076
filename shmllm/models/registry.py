"""The table of architectures.

This module must not import torch, nor a family before it is needed.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import read_text
from shmllm.formats.thinker import THINKERS

ARCHITECTURES: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe",
    "AlbertModel": "albert",
    "ApertusForCausalLM": "apertus",
    "AquilaForCausalLM": "llama",
    "ArceeForCausalLM": "arcee",
    "AyaVisionForConditionalGeneration": "aya_vision",
    "BaiChuanForCausalLM": "baichuan",
    "BaichuanForCausalLM": "baichuan",
    "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeV2ForCausalLM": "bailing_moe_v2",
    "BambaForCausalLM": "bamba",
    "BertModel": "bert",
    "BgeM3EmbeddingModel": "bge_m3",
    "BitNetForCausalLM": "bitnet",
    "BloomForCausalLM": "bloom",
    "CamembertModel": "roberta",
    "ColBERTJinaRobertaModel": "colbert",
    "ColBERTLfm2Model": "lfm2",
    "ColBERTModernBertModel": "modernbert",
    "CodeGenForCausalLM": "codegen",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "Cohere2VisionForConditionalGeneration": "cohere2_vision",
    "CohereForCausalLM": "cohere",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "ElectraModel": "electra",
    "ErnieModel": "ernie",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "EuroBertModel": "eurobert",
    "Exaone4ForCausalLM": "exaone4",
    "Exaone4_5_ForConditionalGeneration": "exaone4_5",
    "ExaoneForCausalLM": "exaone",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "FlexOlmoForCausalLM": "flex_olmo",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Contriever": "contriever",
    "CwmForCausalLM": "cwm",
    "DPRContextEncoder": "dpr",
    "DPRQuestionEncoder": "dpr",
    "DbrxForCausalLM": "dbrx",
    "DebertaModel": "deberta",
    "DebertaV2Model": "deberta_v2",
    "DeciLMForCausalLM": "decilm",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DistilBertModel": "distilbert",
    "Dots1ForCausalLM": "dots1",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "glm",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe_shared",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "KimiLinearForCausalLM": "kimi_linear",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid",
    "GraniteMoeSWAForCausalLM": "granite_moe_swa",
    "GteModel": "gte",
    "GteNewModel": "gte",
    "GraniteSWAForCausalLM": "granite_swa",
    "HF_ColBERT": "colbert",
    "HYV3ForCausalLM": "hy_v3",
    "HeliumForCausalLM": "helium",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "IQuestCoderForCausalLM": "iquestcoder",
    "Idefics3ForConditionalGeneration": "idefics3",
    "Jais2ForCausalLM": "jais2",
    "InternVLForConditionalGeneration": "internvl",
    "InternLM2ForCausalLM": "internlm2",
    "InternLMForCausalLM": "internlm",
    "InternLM3ForCausalLM": "internlm3",
    "JambaForCausalLM": "jamba",
    "JinaBertModel": "jina_bert",
    "JinaEmbeddingsV3Model": "jina_embeddings_v3",
    "LagunaForCausalLM": "laguna",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "LlamaBidirectionalModel": "llama_bidirectional",
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MPNetModel": "mpnet",
    "MPTForCausalLM": "mpt",
    "MT5EncoderModel": "t5_encoder",
    "MellumForCausalLM": "mellum",
    "MiMoForCausalLM": "mimo",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniCPMForCausalLM": "minicpm",
    "MiniMaxForCausalLM": "minimax",
    "MiniMaxM1ForCausalLM": "minimax",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxText01ForCausalLM": "minimax",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "mistral",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv4_6",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "ModernBertModel": "modernbert",
    "MptForCausalLM": "mpt",
    "NanoChatForCausalLM": "nanochat",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "NewModel": "gte",
    "NomicBertModel": "nomic_bert",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "OpenAIPrivacyFilterModel": "openai_privacy_filter",
    "OPTForCausalLM": "opt",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "OrionForCausalLM": "orion",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "RWForCausalLM": "falcon",
    "RobertaModel": "roberta",
    "SarvamMLAForCausalLM": "sarvam_mla",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "SolarOpenForCausalLM": "solar_open",
    "StableLMEpochForCausalLM": "stablelm",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "Step3p5ForCausalLM": "step3p5",
    "Step3p7ForConditionalGeneration": "step3p5",
    "T5EncoderModel": "t5_encoder",
    "TeleChat2ForCausalLM": "telechat2",
    "UMT5EncoderModel": "t5_encoder",
    "VaultGemmaForCausalLM": "vaultgemma",
    "VoxtralForConditionalGeneration": "voxtral",
    "VoyageQwen3BidirectionalEmbedModel": "voyage",
    "WhisperForConditionalGeneration": "whisper",
    "XLMRobertaModel": "roberta",
    "XverseForCausalLM": "llama",
    "YoutuForCausalLM": "youtu",
}
"""For each name in a config.json's ``architectures``, the name of the family's module in this
package. A family has one name here: that with an LM head, or the bare model if it never generates.
Other names, such as "Qwen3Model", "Qwen3ForSequenceClassification" and "BertForMaskedLM", belong to
the family of the same stem."""


class Purpose(Enum):
    """What an architecture computes of hidden states."""

    GENERATE = "tokens, and vectors"
    EMBED = "vectors"
    SPARSE = "sparse vectors"
    CLASSIFY = "scores of classes"
    CLASSIFY_TOKENS = "scores of classes, for each token"
    REWARD = "rewards of each token"


_PURPOSES = {
    "ForSequenceClassification": Purpose.CLASSIFY,
    "ForTokenClassification": Purpose.CLASSIFY_TOKENS,
    "ForProcessRewardModel": Purpose.REWARD,
    "ForRewardModel": Purpose.REWARD,
    "SpladeSparseEmbeddingModel": Purpose.SPARSE,
    "ForMaskedLM": Purpose.EMBED,
    "ForPreTraining": Purpose.EMBED,
    "Model": Purpose.EMBED,
}
"""The ends of the names of architectures without an LM head, or with one that is left out."""

_WITH_LM_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

TEXT_MODELS: dict[str, tuple[str, ...]] = {
    "AyaVisionForConditionalGeneration": ("cohere2", "cohere"),
    "Cohere2VisionForConditionalGeneration": ("cohere2",),
    "Exaone4_5_ForConditionalGeneration": ("exaone4", "exaone4_5_text"),
    "KimiK25ForConditionalGeneration": ("deepseek_v3",),
    "KimiVLForConditionalGeneration": ("deepseek_v3",),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3",),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma3nForConditionalGeneration": ("gemma3n_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Glm46VForConditionalGeneration": ("glm4v_text", "glm4v_moe_text"),
    "Glm4vForConditionalGeneration": ("glm4v_text",),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe_text",),
    "GlmOcrForConditionalGeneration": ("glm_ocr_text",),
    "GotOcr2ForConditionalGeneration": ("qwen2",),
    "Idefics3ForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": ("qwen2", "llama", "qwen3", "qwen3_moe", "internlm2"),
    "Lfm2VlForConditionalGeneration": ("lfm2",),
    "LightOnOCRForConditionalGeneration": ("qwen3",),
    "LightOnOcrForConditionalGeneration": ("qwen3",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    "LlavaForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaNextForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaOnevisionForConditionalGeneration": ("qwen2", "llama", "mistral"),
    "MiniCPMV4_6ForConditionalGeneration": ("qwen3_5_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3", "mistral4"),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr_vl_text",),
    "Qwen2AudioForConditionalGeneration": ("qwen2",),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Qwen2_5OmniThinkerForConditionalGeneration": ("qwen2_5_omni_text",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
    "Qwen3ASRForConditionalGeneration": ("qwen3", "qwen3_asr_text"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ("qwen3_omni_moe_text",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
    "SmolVLMForConditionalGeneration": ("llama",),
    "Step3p7ForConditionalGeneration": ("step3p5",),
    "VoxtralForConditionalGeneration": ("llama",),
}
"""For each architecture of a multimodal model, the values that ``model_type`` of its
``text_config`` may have; the first one if it is absent. Other language models in the same
architecture are other families."""

REGISTERED: dict[str, str] = {}
"""The same for the families of other packages, as "module" or "module:object"."""

NUM_NAMED = 3
"""The number of known architectures that the error for an unknown one names."""


def register_model(architecture: str, family: str) -> None:
    """Adds a family that another package has, for a general plugin to call; docs/plugins.md says
    how. A process that reads config.json or makes a model imports the family.

    Args:
        architecture: the name in a config.json's ``architectures``.
        family: "module", or "module:object", with what `find_family` returns.

    Raises:
        ValueError: the architecture is one of ours, or a name has the wrong form.
    """
    if not isinstance(family, str) or not all(family.split(":")) or family.count(":") > 1:
        raise ValueError(f"a family is named as 'module' or 'module:object', got {family!r}")
    if architecture in ARCHITECTURES:
        raise ValueError(f"{architecture} is an architecture that shmllm has itself")
    REGISTERED[architecture] = family


def known_architectures() -> frozenset[str]:
    """Returns the names in a config.json's ``architectures`` that have a family, those of whole
    models whose thinker has one included."""
    return frozenset({*ARCHITECTURES, *THINKERS, *REGISTERED})


def purpose_of(architecture: str) -> Purpose:
    """Returns what an architecture computes of hidden states, by the end of its name."""
    if architecture.endswith(_WITH_LM_HEAD) or architecture in REGISTERED:
        return Purpose.GENERATE
    ends = (purpose for end, purpose in _PURPOSES.items() if architecture.endswith(end))
    return next(ends, Purpose.EMBED)


def _of_same_stem(architecture: str) -> str:
    """Returns the name in ARCHITECTURES of the architecture that has the same layers; the name
    itself if there is none."""
    for end in _PURPOSES:
        stem = architecture.removesuffix(end)
        if stem != architecture:
            stem = stem.removesuffix("Text")  # of language models of multimodal ones
            known = (f"{stem}{other}" for other in (*_WITH_LM_HEAD, "Model"))
            return next((name for name in known if name in ARCHITECTURES), architecture)
    return architecture


def find_family(architecture: str) -> Any:
    """Returns the module of a family. It has ``configure(fields)``, which returns a `ModelConfig`,
    and may have ``named_weights(weights, config)``, ``module_weights(weights, config)`` and
    ``other_names(weights, config)``; README.md describes them.

    Raises:
        EngineStartError: the architecture is unknown; the message names the nearest known ones. Or
            the family that another package has cannot be used.
    """
    if architecture in REGISTERED:
        return _find_registered(architecture, REGISTERED[architecture])
    name = architecture if architecture in ARCHITECTURES else _of_same_stem(architecture)
    if name not in ARCHITECTURES:
        raise EngineStartError(_unknown(architecture))
    return import_module(f"shmllm.models.{ARCHITECTURES[name]}")


def _find_registered(architecture: str, name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        family: Any = import_module(module)
        for part in filter(None, path.split(".")):
            family = getattr(family, part)
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise EngineStartError(
            f"{architecture} is registered as {name}, which cannot be imported: {text}"
        ) from problem
    if not callable(getattr(family, "configure", None)):
        raise EngineStartError(
            f"{architecture} is registered as {name}, which has no configure(fields): a family is "
            "what shmllm/models/README.md describes; classes of vLLM's models do not run here"
        )
    return family


def _unknown(architecture: str) -> str:
    import difflib

    shown = architecture[:100]  # a comparison takes time that grows with both lengths
    known = sorted({*ARCHITECTURES, *REGISTERED})
    near = difflib.get_close_matches(shown, known, NUM_NAMED, 0.0)
    advice = "shmllm/models/README.md says how to add one"
    if is_of_transformers(architecture):
        advice = f"model_impl='transformers' may run it, slower, and {advice}"
    return (
        f"unknown architecture {shown!r}; the nearest of {len(known)} known ones: "
        f"{', '.join(near)}; {advice}"
    )


def is_of_transformers(architecture: str) -> bool:
    """Returns whether the installed transformers has a causal language model of this name. It reads
    a source file: to import transformers would take seconds."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = read_text(path)
    except OSError:
        return False
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("_MAPPING_NAMES")[0]
    return f'"{architecture}"' in table
