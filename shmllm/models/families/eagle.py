"""EAGLE: a layer of Llama, Qwen2 or Qwen3 that drafts from the hidden states of a larger model.

The checkpoint of SafeAILab calls the layer of EAGLE-3 "midlayer"; that of the library speculators
has the fields of the layer in an object of its own (`formats.draft_heads`).
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.formats.draft_heads import EAGLE, EAGLE3
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.draft_specs import MOST_LEVELS, EagleSpec
from shmllm.models.families import llama, qwen2, qwen3
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_LEVELS = "eagle_aux_hidden_state_layer_ids"
_COUNTS = ("num_aux_hidden_states", "num_aux_layers")
_LAYER = "model.layers.0."
_CONFIGURE = {"llama": llama.configure, "qwen2": qwen2.configure, "qwen3": qwen3.configure}
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_REFUSED = ("add_para_norm",)


def configure(fields: Fields) -> ModelConfig:
    for name in _REFUSED:
        if fields.values.get(name):
            raise fields.error(f"{name!r} is not supported")
    architecture = architecture_name(fields)
    is_projected = architecture in EAGLE.values()
    kinds = {name: kind for heads in (EAGLE, EAGLE3) for kind, name in heads.items()}
    model = _CONFIGURE[kinds[architecture]](fields)
    eagle = _read_projected(fields, model) if is_projected else _read_beside(fields, model)
    if eagle.num_drafted > model.vocab_size:
        raise fields.error(
            f"'draft_vocab_size' ({eagle.num_drafted:,}) is more than 'vocab_size' "
            f"({model.vocab_size:,})"
        )
    if not eagle.levels and eagle.levels is not None and eagle.source_width != model.hidden_size:
        raise fields.error(
            f"'target_hidden_size' ({eagle.source_width:,}) must be 'hidden_size' "
            f"({model.hidden_size:,}) where no projection makes one of the other"
        )
    first, *others = model.layers
    assert isinstance(first.mixer, AttentionSpec), "it is that of a dense model"
    mixer = first.mixer
    if not is_projected:
        mixer = replace(mixer, input_width=2 * model.hidden_size)
    elif "qkv_bias" in fields.values:  # of SafeAILab's layer, in the place of a family's own
        mixer = replace(mixer, bias=fields.flag("qkv_bias", False))
    layers = replace(first, mixer=mixer, norms=replace(first.norms, before_mixer=None)), *others
    parts = {
        "d2t": eagle.num_drafted < model.vocab_size,
        "mask_hidden": eagle.mask_token is not None,
    }
    skipped = ("t2d", *(name for name, is_there in parts.items() if not is_there))
    return replace(
        model,
        layers=layers,
        drafting=eagle,
        final_norm=not is_projected,
        tie_word_embeddings=False,
        logits_scale=fields.number("logit_scale", 1.0),
        skipped_prefixes=skipped,
    )


def _read_projected(fields: Fields, model: ModelConfig) -> EagleSpec:
    """Reads what EAGLE 1 and 2 have beside their layers."""
    vocab = model.vocab_size
    for name in ("draft_vocab_size", "truncated_vocab_size"):
        if fields.integer(name, vocab) != vocab:
            raise fields.error(f"{name!r} must be 'vocab_size' ({vocab:,}): others lack the tokens")
    return EagleSpec(
        source_width=model.hidden_size, levels=(), num_drafted=vocab, is_projected=True
    )


def _read_beside(fields: Fields, model: ModelConfig) -> EagleSpec:
    """Reads what EAGLE-3 has beside its layers."""
    nested = Fields(fields.table("eagle_config"), f"{fields.where}: eagle_config")
    if model.tie_word_embeddings:
        raise fields.error("'tie_word_embeddings' must be false: the LM head has its own tokens")
    levels: tuple[int, ...] | None = ()
    if nested.flag("use_aux_hidden_state", True):
        levels = _read_levels(_owner(nested, fields, _LEVELS))
    return EagleSpec(
        source_width=fields.integer("target_hidden_size", model.hidden_size),
        levels=levels,
        num_drafted=fields.integer("draft_vocab_size", model.vocab_size),
        norms_sources=_owner(nested, fields, "norm_before_fc").flag("norm_before_fc", False),
        norms_levels=fields.flag("fc_norm", False),
        norms_stream=fields.flag("norm_before_residual", False),
        feeds_normed=fields.flag("norm_output", False),
        mask_token=_read_mask(fields, model.vocab_size),
    )


def _read_mask(fields: Fields, vocab_size: int) -> int | None:
    """Reads the token that stands for tokens that are not known, of P-EAGLE."""
    found = [name for name in _MASKS if fields.values.get(name) is not None]
    if not found:
        if fields.flag("parallel_drafting", False):
            raise fields.error(f"'parallel_drafting' needs one of the fields {', '.join(_MASKS)}")
        return None
    return fields.integer(found[0], minimum=0, maximum=vocab_size - 1)


def _owner(nested: Fields, fields: Fields, name: str) -> Fields:
    return nested if name in nested.values else fields


def _read_levels(fields: Fields) -> tuple[int, ...] | None:
    levels = fields.values.get(_LEVELS)
    if levels is not None and (
        not isinstance(levels, list)
        or not 0 < len(levels) <= MOST_LEVELS
        or any(type(each) is not int or each < 0 for each in levels)
    ):
        raise fields.error(
            f"{_LEVELS!r} must be a list of 1 to {MOST_LEVELS} numbers of layers, not "
            f"{reprlib.repr(levels)}"
        )
    found = None if levels is None else tuple(sorted(levels))
    for name in _COUNTS:
        count = fields.optional_integer(name)
        if count not in (None, 3 if found is None else len(found)):
            raise fields.error(f"{name!r} ({count}) must be the number of layers in {_LEVELS!r}")
    return found


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {
        "midlayer." + name.removeprefix(_LAYER): views
        for name, views in weights.items()
        if name.startswith(_LAYER)
    }
