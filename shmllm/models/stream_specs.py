"""What a model has beside its layers' residual stream: inputs of each layer's own, several streams.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.specs import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec:
    """Inputs that each layer has of its own: per-layer embeddings (Gemma 3n and 4).

    A token's inputs are the sum of a norm of a projection of its embedding, and of a lookup in a
    table with a part for each layer. Behind its MLP, a layer multiplies the activation of a
    projection of the residual stream by its input, projects the product back, normalises that, and
    adds it to the stream.

    Attributes:
        vocab_size: the number of tokens in the table.
        width: the width of a layer's input.
        activation: the activation.
        padding: the token whose inputs those tokens get that the table lacks, and embeddings that a
            prompt gives itself.
    """

    vocab_size: int
    width: int
    activation: Activation
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several residual streams, one of which each layer reads (AltUp; Baykal et al., 2023).

    The streams begin as projections of a token's embedding, and end as the mean of projections. In
    front of a layer, a mixture of all streams predicts each of them. Behind it, each is corrected
    by what the layer has changed in the active one. Inputs of a layer's own are added to all
    streams but the first.

    Attributes:
        num_streams: the number of streams.
        active: the stream that layers read.
        scaled: whether the projection of a layer's own input reads the active stream times a
            weight.
    """

    num_streams: int
    active: int = 0
    scaled: bool = True
