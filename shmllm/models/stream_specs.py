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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSpec:
    """Several residual streams, of whose weighted sum mixers and MLPs compute what is added to each
    of them, times another weight (hyper-connections; Zhu et al., 2024). Tencent's HY V4 has no
    mixture of the streams, DeepSeek V4 one whose rows and columns add up to 1
    (manifold-constrained hyper-connections; Xie et al., 2026).

    The weights are gates of a token, ``sigmoid(scale * logit + bias)``, of logits that are products
    of all streams, side by side and divided by the root of their mean square. All streams begin as
    the token's embedding, and end as such a sum.

    Attributes:
        num_streams: the number of streams.
        magnitude: the factor of the gates of what is added.
        eps: added to all gates; if there is a mixture, to it and to the gates of the sum alone.
        norm_eps: added to the mean square.
        iterations: how often the columns of the mixture are normalised; 0: there is none.
    """

    num_streams: int
    magnitude: float
    eps: float
    norm_eps: float
    iterations: int = 0

    @property
    def num_gates(self) -> int:
        """The number of gates of a token, and of elements of its mixture, of one connection."""
        return self.num_streams * (2 + (self.num_streams if self.iterations else 0))

    def num_elements(self, hidden: int, num_layers: int) -> int:
        """The number of elements of all matrices, with hidden states of a width."""
        return (2 * num_layers * self.num_gates + self.num_streams) * self.num_streams * hidden
