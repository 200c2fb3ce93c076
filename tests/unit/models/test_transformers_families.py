"""Every family of causal models that transformers has: it is one of ours, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from shmllm.errors import EngineStartError
from shmllm.models.architectures import ARCHITECTURES
from shmllm.models.config import ModelConfig
from shmllm.models.own_names import STEMS
from shmllm.models.text_models import TEXT_MODELS

INCOMPLETE = {"gemma4_assistant"}
"""The families whose configuration has no valid defaults."""
FAMILIES = {
    name: architecture
    for name, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    if name not in INCOMPLETE
}
REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma3": {"mm_tokens_per_image": 196},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
}
"""Fields of families whose defaults make no model in transformers."""
SIZES = {"falcon_h1": {"mamba_n_heads": 16}}
"""Fields of families whose default sizes are refused, and those of no published model."""
IN_FILES = {
    *("PhiMoEForCausalLM", "LLaMAForCausalLM", "MiMoForCausalLM", "MiniCPMForCausalLM"),
    *("DeciLMForCausalLM", "LlamaBidirectionalModel", "NewModel", "JinaBertModel"),
    *("Lfm2BidirP2ForTokenClassification", "Lfm2BidirectionalModel"),
    "JinaEmbeddingsV5Model",
    *("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "Step3p5ForCausalLM"),
    "MiniMaxM3SparseForCausalLM",
    *("Contriever", "HF_ColBERT", "VoyageQwen3BidirectionalEmbedModel", "BgeM3EmbeddingModel"),
    *("ColBERTJinaRobertaModel", "ColBERTLfm2Model", "ColBERTModernBertModel"),
    *("BailingMoeV2ForCausalLM", "DeepseekForCausalLM", "GteNewModel", "MPTForCausalLM"),
    "BailingMoeV3ForCausalLM",
    *("InternLM2ForCausalLM", "OrionForCausalLM", "BaichuanForCausalLM", "BaiChuanForCausalLM"),
    *("DomynEdgeForCausalLM", "PanguEmbeddedForCausalLM", "TeleFLMForCausalLM"),
    *("Param2MoEForCausalLM", "NemotronHPuzzleForCausalLM"),
    "ChatGLMForCausalLM",
    *("TeleChat2ForCausalLM", "InternLMForCausalLM", "AquilaForCausalLM", "RWForCausalLM"),
    *("StableLMEpochForCausalLM", "ExaoneMoEForCausalLM", "BailingMoeForCausalLM"),
    *("TeleChat3ForCausalLM", "XverseForCausalLM", "Phi4MMForCausalLM"),
    *("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
    *("EagleLlamaForCausalLM", "EagleQwen2ForCausalLM", "DFlashDraftModel"),
    "MedusaModel",
    *(f"{own}ForCausalLM" for _, own in STEMS.values()),
}
"""The names that published files have for what transformers calls otherwise, or lacks."""
RUN = {name for name, architecture in FAMILIES.items() if architecture in ARCHITECTURES}


def write_config(model_type: str, directory: Path) -> None:
    """Writes transformers' default configuration of a family, as `save_pretrained` does."""
    fields = REQUIRED.get(model_type, {}) | SIZES.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**fields)
    config.architectures = [FAMILIES[model_type]]
    config.save_pretrained(directory)


def test_transformers_has_the_families_that_run() -> None:
    others = set(ARCHITECTURES) - set(FAMILIES.values())
    tables = MODEL_MAPPING_NAMES, MODEL_FOR_PRETRAINING_MAPPING_NAMES
    known = {name for table in tables for name in table.values()}
    known |= set(MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values())
    known |= set(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values())
    known |= set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    known |= {"DPRQuestionEncoder", "DPRContextEncoder"}  # transformers has a table for one of them
    assert others <= TEXT_MODELS.keys() | known | IN_FILES
    assert len(FAMILIES) - len(RUN) >= 28


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - RUN))
def test_another_family_is_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    write_config(model_type, tmp_path)
    with pytest.raises(EngineStartError, match=f"unknown architecture '{FAMILIES[model_type]}'"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("model_type", sorted(RUN))
def test_a_family_that_runs_takes_transformers_defaults(model_type: str, tmp_path: Path) -> None:
    write_config(model_type, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    config = ModelConfig.from_directory(tmp_path)
    written, own = STEMS.get(("model_type", model_type), ("", ""))
    assert config.architecture == own + FAMILIES[model_type].removeprefix(written)
    text = fields.get("text_config", fields)
    assert config.vocab_size == text["vocab_size"]
