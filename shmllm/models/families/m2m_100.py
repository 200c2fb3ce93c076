"""M2M100 (Fan et al., 2021) and NLLB-200 (NLLB team, 2022): mBART with sinusoids of positions, and
without a norm of embeddings."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import bart
from shmllm.models.fields import Fields

_KIND = bart.BartKind(
    is_pre_norm=True,
    embedding_norm=False,
    sinusoids="fairseq",
    first_position=bart.FIRST_POSITION,
    has_bias=False,
    activation="relu",
    vocab_size=128_112,
    scales=True,
)


def configure(fields: Fields) -> ModelConfig:
    padding = fields.integer("pad_token_id", 1, minimum=0)
    if padding != bart.FIRST_POSITION - 1:  # the first position is behind it
        raise fields.error(f"pad_token_id {padding} is not supported; supported: 1")
    return bart.configure_kind(fields, _KIND)


named_weights = bart.named_weights
