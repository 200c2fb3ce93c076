"""What the encoders of texts are: the values that decide what they compute.

A family's module makes them from config.json, `models/towers.py` makes towers of them. This module
must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.models.bias_specs import DistanceBiases
from shmllm.models.fields import Fields
from shmllm.models.rope_config import RopeConfig
from shmllm.models.sinusoid_kinds import SinusoidKind
from shmllm.models.specs import MLPSpec
from shmllm.models.vision.grids import Grid

TextActivation = Literal["gelu", "gelu_tanh", "silu", "relu"]
_ACTIVATIONS: tuple[TextActivation, ...] = get_args(TextActivation)


def activation_of(fields: Fields, decoder: MLPSpec) -> TextActivation:
    """Returns the activation of an encoder's MLPs, which is that of the decoder's.

    Raises:
        EngineStartError: encoders have no such activation.
    """
    found = next((each for each in _ACTIVATIONS if each == decoder.activation), None)
    if found is None:
        raise fields.error(
            f"an encoder with the activation {decoder.activation!r} is not supported"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTower:
    """What encoders of texts have in common: layers of attention to the whole text and an MLP, and
    what each layer of a decoder reads of their results.

    Attributes:
        hidden_size: the width of the stream, and of the tokens' embeddings.
        num_layers: the number of layers.
        num_heads: the number of heads.
        head_dim: the width of a head.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        most_tokens: the most tokens of a text.
        embedding_scale: the factor of the tokens' embeddings.
        num_decoder_layers: the number of the decoder's layers.
        kv_width: the width of the keys of one of these, and of the values.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    inner: int
    activation: TextActivation
    most_tokens: int
    embedding_scale: float = 1.0
    num_decoder_layers: int
    kv_width: int

    @property
    def width(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def embedding_width(self) -> int:
        """The width of an embedding: of the keys and values of all layers of the decoder."""
        return 2 * self.num_decoder_layers * self.kv_width

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (4 * self.width + 3 * self.inner)
        return self.hidden_size * (of_layers + self.most_tokens + self.embedding_width)

    @property
    def most_activations(self) -> int:
        """About the most numbers of a token that are in memory at a time: an activation of the MLP
        has up to four tensors, a layer three of the stream, attention the scores of all heads; the
        results are there twice while they are joined."""
        of_attention = 4 * self.width + self.num_heads * self.most_tokens
        return max(4 * self.inner, of_attention, self.embedding_width) + 3 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BartTower(TextTower):
    """The encoder of BART and families after it: LayerNorms, and positions that are added to
    embeddings.

    Attributes:
        is_pre_norm: whether norms are before attention and MLP, with one behind the last layer;
            else they are behind the additions.
        embedding_norm: whether the embeddings have a norm.
        sinusoids: which sinusoids embed positions; None: a checkpoint has the embeddings.
        first_position: the row of the table of positions for the first token.
    """

    is_pre_norm: bool
    embedding_norm: bool
    sinusoids: SinusoidKind | None
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Tower(TextTower):
    """The encoder of T5, mT5 or UMT5: RMSNorms before attention and MLP, scores without a scale,
    biases of scores by distance.

    Attributes:
        gated: whether MLPs have gates.
        eps: of the norms.
        biases: what is added to scores.
        shares_biases: whether all layers have the biases of the first.
    """

    gated: bool
    eps: float
    biases: DistanceBiases
    shares_biases: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaTower(TextTower):
    """The encoder of T5Gemma: RMSNorms of (1 + weight) before and behind attention and MLP, rotated
    queries and keys, and a table of embeddings of its own.

    Attributes:
        vocab_size: the number of tokens in that table.
        num_kv_heads: the number of key heads.
        scale, soft_cap, rope: see `AttentionSpec`.
        windows: of each layer, how far from its own position a token attends; None: to all.
        eps: of the norms.
        has_bias: whether the projections of attention have a bias.
        keys_have_bias: whether those of the decoder's keys and values have one.
    """

    vocab_size: int
    num_kv_heads: int
    scale: float
    soft_cap: float | None
    rope: RopeConfig
    windows: tuple[int | None, ...]
    eps: float
    has_bias: bool
    keys_have_bias: bool

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        return super(GemmaTower, self).num_elements + self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class TextSpec:
    """What a model computes of the text that its encoder reads. A text is one item of a request,
    whose grid is (tokens, 1, 1).

    Attributes:
        tower: what computes it.
        decoder_start: the token that the decoder begins with, unless a file of the model names
            another one; None: there is none.
    """

    tower: TextTower
    decoder_start: int | None

    def num_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings a text has: one for each token."""
        return grid[0]
