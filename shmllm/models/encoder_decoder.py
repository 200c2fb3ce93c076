"""Decoders whose layers attend to what an encoder has computed, too.

A request begins with the positions of the encoder, and its text follows. Each layer of the decoder
is two here: its attention to the text, and its attention to the encoder with the MLP. The second
one reads the first one's part of the KV cache, where a position of the encoder has the keys and
values that the second one projects, and a position of text those of the first one. So a token's
attention to text is a chunk that begins behind the encoder's positions. This module must not import
torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, Encoded
from shmllm.models.specs import MLPSpec
from shmllm_kernels.windows import Chunk

if TYPE_CHECKING:
    from shmllm.models.fields import Fields
    from shmllm.models.matrices import Destination

_ROUNDED = 128
"""The text begins at a multiple of this many positions. So a block of the KV cache has none of
both, and those of the encoder are found whatever the text is."""


def text_begins(num_positions: int) -> int:
    """Returns the position of the first token of text behind so many that an encoder computes at
    most."""
    return -(-num_positions // _ROUNDED) * _ROUNDED


def check_has_encoder(fields: Fields) -> None:
    """Raises EngineStartError if ``language_model_only`` leaves out the encoder of a family without
    a table for it in config.json, which shows as a null there."""
    if "audio_config" in fields.values:
        raise fields.error(
            "the decoder needs its encoder, which language_model_only leaves out, and a draft lacks"
        )


def pairs_of_layers(
    own: AttentionSpec,
    cross: AttentionSpec,
    mlp: MLPSpec,
    norms: tuple[LayerNorms, LayerNorms],
    begin: int,
    count: int,
) -> list[LayerSpec]:
    """Returns the layers that so many of a checkpoint's are.

    Args:
        own: the attention to the text.
        cross: the attention to the encoder.
        mlp: the MLP.
        norms: those of the first layer of a pair, and of the second.
        begin: the result of `text_begins`.
        count: the number of the checkpoint's layers.
    """
    own = replace(own, window=Chunk(begin))
    found = []
    for index in range(count):
        reads = replace(cross, ahead=Encoded(begin), source=2 * index)
        found.append(LayerSpec(mixer=own, mlp=None, norms=norms[0]))
        found.append(LayerSpec(mixer=reads, mlp=mlp, norms=norms[1]))
    return found


def rows_from(views: tuple[Destination, ...], first: int) -> tuple[Destination, ...]:
    """Returns the destination of the rows of a table from one on: of embeddings of positions, those
    of the text."""
    from shmllm.models.matrices import matrix_of

    table = matrix_of(views)
    return table.split_with_sizes([first, table.shape[0] - first])[1:]


def name_of_pair(name: str, parts: tuple[str, str], layers: str = ".layers.") -> str:
    """Returns a checkpoint's name for the weight of a layer, of which two are one of its own.

    Args:
        name: the name with the number of ours.
        parts: what names of attention to the text have, and of attention to the encoder instead.
        layers: what is before the number.
    """
    prefix, _, behind = name.partition(layers)
    if not behind:
        return name
    index, _, behind = behind.partition(".")
    layer, is_cross = divmod(int(index), 2)
    return f"{prefix}{layers}{layer}.{behind.replace(*parts) if is_cross else behind}"
