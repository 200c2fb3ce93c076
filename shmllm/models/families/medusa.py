"""Medusa: heads that predict further tokens from the last hidden state of a larger model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.draft_specs import MedusaSpec
from shmllm.models.fields import Fields
from shmllm.models.specs import NormSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_LENGTH = 2**20
"""Positions mean nothing to heads without attention."""


def configure(fields: Fields) -> ModelConfig:
    vocab, hidden = fields.integer("vocab_size"), fields.integer("hidden_size")
    if fields.integer("truncated_vocab_size", vocab) != vocab:
        raise fields.error(f"'truncated_vocab_size' must be 'vocab_size' ({vocab:,})")
    return ModelConfig(
        architecture=architecture_name(fields),
        vocab_size=vocab,
        hidden_size=hidden,
        max_position_embeddings=_LENGTH,
        layers=(),
        norm=NormSpec(),
        final_norm=False,
        logits_scale=fields.number("logit_scale", 1.0),
        drafting=MedusaSpec(
            source_width=hidden,
            levels=(),
            num_drafted=vocab,
            has_table=False,
            has_head=False,
            num_heads=_count(fields, "heads", 5),
            num_blocks=_count(fields, "layers", 1),
            has_bias=fields.flag("medusa_fc_bias", False),
            shares_head=fields.flag("original_lm_head", False),
        ),
    )


def _count(fields: Fields, what: str, default: int) -> int:
    """Reads a number that has different names in different files: "medusa_num_heads" and the like,
    as vLLM does."""
    named = [name for name in fields.values if "num" in name and what in name]
    return fields.integer(named[0], maximum=64) if named else default


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """The first files number what each head consists of, its LM head last."""
    found: NamedWeights = {}
    assert isinstance(config.drafting, MedusaSpec), "it is of this family"
    last = config.drafting.num_blocks
    for name, views in weights.items():
        parts = name.removeprefix("transformer.").split(".")
        if parts[0] == "blocks":  # "blocks.HEAD.layers.BLOCK.weight"
            found[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = views
        elif parts[0] == "lm_heads":
            found[f"{parts[1]}.{last}.{parts[2]}"] = views
    return found | {f"medusa_heads.{name}": views for name, views in found.items()}
