"""Compares the logits of text with transformers, in models that see images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_text_models import KINDS
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.vision_families import FAMILIES
from support.vision_models import VISION_FAMILIES, make_vision_model, prompt_types

from shmllm.errors import EngineStartError
from shmllm.models.architectures import ARCHITECTURES
from shmllm.models.registry import find_family
from shmllm.models.text_models import TEXT_MODELS

TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in VISION_FAMILIES},
    "llava-mistral": ("llava", {"model_type": "mistral", "sliding_window": 7}),
    "llava-qwen2": ("llava", {"model_type": "qwen2"}),
    "llava_next-mistral": ("llava_next", {"model_type": "mistral", "sliding_window": 7}),
    "exaone4_5-pattern": ("exaone4_5", {"sliding_window_pattern": 2, "layer_types": None}),
    "internvl-llama": ("internvl", {"model_type": "llama"}),
    "internvl-qwen3": ("internvl", {"model_type": "qwen3", "head_dim": 16}),
    "internvl-qwen3_moe": (
        "internvl",
        {"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 24}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_vl2-heads": ("deepseek_vl2", {"use_mla": False, "num_key_value_heads": 2}),
    "deepseek_vl2-sigmoids": (
        "deepseek_vl2",
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.0},
    ),
    "glm46v-glm4v_moe": (
        "glm46v",
        {"model_type": "glm4v_moe_text", "moe_intermediate_size": 24}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2},
    ),
    "aya_vision-cohere": ("aya_vision", {"model_type": "cohere", "attention_bias": True}),
    "paligemma-gemma2": ("paligemma", {"model_type": "gemma2", "sliding_window": 64}),
    "smolvlm-wide-heads": ("smolvlm", {"head_dim": 20, "attention_bias": True}),
    "qwen2_5_vl-window": (
        "qwen2_5_vl",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}


PUBLISHED = {
    *(f"{name}ForConditionalGeneration" for name in ("KimiK25", "KimiVL")),
    *("HCXVisionV2ForCausalLM", "DeepseekOcrForConditionalGeneration"),
    *("DeepseekVLV2ForCausalLM", "DotsOCRForCausalLM"),
}
"""Architectures that transformers does not have, of models that it has, or whose modules another
one of its models has; see `test_kimi_files` and `test_tower_weights`."""
LENT = {f"{name}ForConditionalGeneration" for name in ("UnlimitedOcr", "DeepseekVL2", "DotsOCR")}
"""The names of what stands for models that transformers does not have: the modules of another one,
`deepseek_vl2_model` and `dots_ocr_model`."""
UNSCALED = ("aya_vision", "cohere2_vision")
"""Families whose factor of logits transformers 5.24 leaves out."""
RETRIEVERS = {
    *("ColModernVBertForRetrieval", "ColPaliForRetrieval", "ColQwen2ForRetrieval"),
    "JinaVLForRanking",
}
"""Architectures that generate nothing; see `test_page_retrievers` and `test_image_rerankers`."""
OF_TEXTS_AND_IMAGES = {f"{kind.name}Model" for kind in KINDS.values()}
"""Likewise; see `e2e/test_image_text_models`."""
NEVER_TIED = ("muse_glimmer",)
"""Families whose embeddings are not rows of the LM head."""
OTHER_SPELLINGS = {
    "Ernie4_5_VL_MoeForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
}
"""What published files call architectures whose names in transformers are others."""
MARKS = {"ernie4_5_vl_moe": [443, 444, 446, 447]}
"""Tokens around images and videos that have experts of images."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tied: bool, tmp_path: Path) -> None:
    name, text = CASES[case]
    tie = {"tie_word_embeddings": tied}
    reference = make_vision_model(name, tmp_path, outer=tie, **(text | tie))
    if tied and name in NEVER_TIED:
        with pytest.raises(EngineStartError, match="tie_word_embeddings true is not supported"):
            load(tmp_path)
        return
    tokens = TOKENS[:20] + MARKS.get(name, []) + TOKENS[20:]
    types = prompt_types(reference, torch.tensor([tokens]))
    expected = reference_logits(reference, tokens, **types)
    model = load(tmp_path)
    if name in UNSCALED:
        assert model.config.logits_scale != 1
        expected = expected * model.config.logits_scale
    ours = our_logits(model, tokens)
    assert_logits_close(ours, expected, 1e-4)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_every_architecture_with_a_tower_has_a_case() -> None:
    """A family with a tower has a function for it."""
    seeing = {name for name in TEXT_MODELS if hasattr(find_family(name), "read_vision")}
    assert seeing <= ARCHITECTURES.keys()
    names = {family.architecture for family in FAMILIES.values()}
    known = (names - LENT) | PUBLISHED | RETRIEVERS | OF_TEXTS_AND_IMAGES
    assert known == seeing - OTHER_SPELLINGS
