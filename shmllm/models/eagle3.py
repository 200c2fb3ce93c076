"""EAGLE-3: a layer of Llama or Qwen3 that drafts from the hidden states of a larger model.

The checkpoint of SafeAILab calls its layer "midlayer"; that of the library speculators has the
fields of the layer in an object of its own (`formats.eagle_heads`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.formats.eagle_heads import ARCHITECTURES
from shmllm.models import llama, qwen3
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.eagle_specs import MOST_LEVELS, EagleSpec
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_LEVELS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "model.layers.0."
_CONFIGURE = {"llama": llama.configure, "qwen3": qwen3.configure}
_REFUSED = ("fc_norm", "num_aux_hidden_states", "parallel_drafting", "pard_token")


def configure(fields: Fields) -> ModelConfig:
    nested = Fields(fields.table("eagle_config"), f"{fields.where}: eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.error("'use_aux_hidden_state' must be true: others are not supported")
    for name in _REFUSED:
        if fields.values.get(name):
            raise fields.error(f"{name!r} is not supported")
    kinds = {name: kind for kind, name in ARCHITECTURES.items()}
    model = _CONFIGURE[kinds[architecture_name(fields)]](fields)
    if model.tie_word_embeddings:
        raise fields.error("'tie_word_embeddings' must be false: the LM head has its own tokens")
    eagle = EagleSpec(
        source_width=fields.integer("target_hidden_size", model.hidden_size),
        levels=_read_levels(nested if _LEVELS in nested.values else fields),
        num_drafted=fields.integer("draft_vocab_size", model.vocab_size),
        norms_sources=_flag(nested, fields, "norm_before_fc"),
        norms_stream=fields.flag("norm_before_residual", False),
        feeds_normed=fields.flag("norm_output", False),
    )
    if eagle.num_drafted > model.vocab_size:
        raise fields.error(
            f"'draft_vocab_size' ({eagle.num_drafted:,}) is more than 'vocab_size' "
            f"({model.vocab_size:,})"
        )
    first, *others = model.layers
    assert isinstance(first.mixer, AttentionSpec), "it is that of a dense model"
    mixer = replace(first.mixer, input_width=2 * model.hidden_size)
    first = replace(first, mixer=mixer, norms=replace(first.norms, before_mixer=None))
    skipped = ("t2d", "d2t") if eagle.num_drafted == model.vocab_size else ("t2d",)
    return replace(model, layers=(first, *others), eagle=eagle, skipped_prefixes=skipped)


def _flag(nested: Fields, fields: Fields, name: str) -> bool:
    return (nested if name in nested.values else fields).flag(name, False)


def _read_levels(fields: Fields) -> tuple[int, ...] | None:
    levels = fields.values.get(_LEVELS)
    if levels is None:
        return None
    if (
        not isinstance(levels, list)
        or not 0 < len(levels) <= MOST_LEVELS
        or any(type(each) is not int or each < 0 for each in levels)
    ):
        raise fields.error(
            f"{_LEVELS!r} must be a list of 1 to {MOST_LEVELS} numbers of layers, not {levels!r}"
        )
    return tuple(sorted(levels))


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {
        "midlayer." + name.removeprefix(_LAYER): views
        for name, views in weights.items()
        if name.startswith(_LAYER)
    }
