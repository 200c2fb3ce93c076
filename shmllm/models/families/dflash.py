"""DFlash: layers of Qwen3 that draft a block of tokens from the hidden states of a larger model.

``target_layer_ids`` are the layers whose results are read, from 0 on; the library speculators says
behind how many layers they are.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.draft_specs import MOST_LEVELS, BlockSpec
from shmllm.models.families import qwen3
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec

_LAYERS, _LEVELS, _MASK = "target_layer_ids", "aux_hidden_state_layer_ids", "mask_token_id"
_REFUSED = (
    *("use_swa", "sample_from_anchor", "attention_sink_bias", "attention_value_scale"),
    *("conv_kernel_size", "selector_rank", "markov_rank", "shift_label"),
)


def configure(fields: Fields) -> ModelConfig:
    nested = Fields(fields.table("dflash_config"), f"{fields.where}: dflash_config")
    for name in _REFUSED:
        for each in (nested, fields):
            if each.values.get(name):
                raise each.error(f"{name!r} is not supported")
    if fields.values.get("projector_type") not in (None, "dflash"):
        raise fields.error("'projector_type' must be 'dflash': others are not supported")
    for each in (nested, fields):
        if not each.flag("use_aux_hidden_state", True):
            raise each.error("'use_aux_hidden_state' must be true: others are not supported")
        if not each.flag("is_neox_style", True):
            raise each.error("'is_neox_style' must be true: others are not supported")
    model = qwen3.configure(fields)
    if any(each.window is not None for each in model.attentions):
        raise fields.error("layers with sliding windows are not supported")
    causal = nested.null_as_false("causal").flag("causal", False)
    owner = nested if nested.values.get(_MASK) is not None else fields
    spec = BlockSpec(
        source_width=fields.integer("target_hidden_size", model.hidden_size),
        levels=_read_levels(nested, fields),
        num_drafted=fields.integer("draft_vocab_size", model.vocab_size, maximum=model.vocab_size),
        mask_token=owner.integer(_MASK, minimum=0, maximum=model.vocab_size - 1),
        block_size=fields.optional_integer("block_size"),
    )

    def changed(mixer: MixerSpec) -> MixerSpec:
        assert isinstance(mixer, AttentionSpec), "Qwen3's are"
        return mixer if causal else replace(mixer, ahead=None)

    has_offsets = spec.num_drafted < model.vocab_size
    return replace(
        model,
        layers=tuple(layer.with_mixers(changed) for layer in model.layers),
        drafting=spec,
        tie_word_embeddings=False,
        logits_scale=fields.number("logit_scale", 1.0),
        skipped_prefixes=("t2d",) if has_offsets else ("t2d", "d2t"),
    )


def _read_levels(nested: Fields, fields: Fields) -> tuple[int, ...]:
    found = [(fields, _LEVELS, 0), (nested, _LAYERS, 1), (fields, _LAYERS, 1)]
    given = (each for each in found if each[0].values.get(each[1]) is not None)
    owner, name, behind = next(given, found[1])
    layers = owner.values.get(name)
    if (
        not isinstance(layers, list)
        or not 0 < len(layers) <= MOST_LEVELS
        or any(type(each) is not int or each < 0 for each in layers)
    ):
        raise owner.error(
            f"{name!r} must be a list of 1 to {MOST_LEVELS} numbers of layers, not "
            f"{reprlib.repr(layers)}"
        )
    return tuple(sorted(each + behind for each in layers))
