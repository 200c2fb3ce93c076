"""What config.json says of models that draft for others, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig

LAYER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "model_type": "llama",
}
EAGLE = LAYER | {"architectures": ["EagleLlamaForCausalLM"]}
EAGLE3 = LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}
DFLASH = LAYER | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [3, 1]},
}
MEDUSA = {"model_type": "medusa", "vocab_size": 97, "hidden_size": 32, "num_heads": 2}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER | {"model_type": "qwen3"},
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [2, 4],
}


def read(directory: Path, fields: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory).drafting


@pytest.mark.parametrize(
    ("fields", "method", "levels", "mask"),
    [
        (EAGLE, "eagle", (), None),
        (EAGLE3, "eagle3", None, None),
        (EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}}, "eagle3", (), None),
        (EAGLE3 | {"ptd_token_id": 0}, "eagle3", None, 0),
        (SPECULATORS | {"speculators_model_type": "peagle"}, "eagle3", None, 5),
        (DFLASH, "dflash", (2, 4), 5),
        (SPECULATORS, "dflash", (2, 4), 5),
        (MEDUSA, "medusa", (), None),
    ],
)
def test_kinds_of_heads(
    fields: dict[str, Any],
    method: str,
    levels: tuple[int, ...] | None,
    mask: int | None,
    tmp_path: Path,
) -> None:
    found = read(tmp_path, fields)
    assert (found.method, found.levels, found.mask_token) == (method, levels, mask)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (EAGLE | {"truncated_vocab_size": 40}, "'truncated_vocab_size' must be 'vocab_size' (97)"),
        (EAGLE | {"add_para_norm": True}, "'add_para_norm' is not supported"),
        (EAGLE3 | {"tie_word_embeddings": True}, "'tie_word_embeddings' must be false"),
        (EAGLE3 | {"parallel_drafting": True}, "needs one of the fields mask_token_id, pard_token"),
        (EAGLE3 | {"pard_token": 97}, "'pard_token' must be an integer of at most 96"),
        (EAGLE3 | {"num_aux_hidden_states": 2}, "'num_aux_hidden_states' (2) must be the number"),
        (EAGLE3 | {"draft_vocab_size": 98}, "'draft_vocab_size' (98) is more than 'vocab_size'"),
        (
            EAGLE3 | {"target_hidden_size": 48, "eagle_config": {"use_aux_hidden_state": False}},
            "'target_hidden_size' (48) must be 'hidden_size' (32)",
        ),
        (DFLASH | {"dflash_config": {"mask_token_id": 5}}, "'target_layer_ids' must be a list"),
        (DFLASH | {"dflash_config": {"target_layer_ids": [1]}}, "'mask_token_id' is missing"),
        (
            DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"use_swa": True}},
            "dflash_config: 'use_swa' is not supported",
        ),
        (DFLASH | {"sample_from_anchor": True}, "'sample_from_anchor' is not supported"),
        (
            DFLASH
            | {
                "layer_types": ["sliding_attention"],
                "use_sliding_window": True,
                "sliding_window": 8,
            },
            "layers with sliding windows are not supported",
        ),
        (MEDUSA | {"truncated_vocab_size": 50}, "'truncated_vocab_size' must be 'vocab_size' (97)"),
        (MEDUSA | {"num_heads": 65}, "'num_heads' must be an integer of at most 64"),
        (SPECULATORS | {"projector_type": "domino"}, "'projector_type' must be 'dflash'"),
        (SPECULATORS | {"speculators_model_type": "dspark"}, "'dspark' is not supported"),
        (
            SPECULATORS | {"transformer_layer_config": LAYER},
            "model_type 'llama' is not supported; supported: qwen3",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError) as caught:
        read(tmp_path, fields)
    assert words in str(caught.value)


def test_heads_say_how_many_tokens_they_draft(tmp_path: Path) -> None:
    assert read(tmp_path, DFLASH).usual_drafted is None
    assert read(tmp_path, DFLASH | {"block_size": 16}).usual_drafted == 15
    assert read(tmp_path, MEDUSA).usual_drafted == 2
    assert read(tmp_path, EAGLE3).usual_drafted is None
