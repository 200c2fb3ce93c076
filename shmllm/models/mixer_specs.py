"""What mixes the tokens of a layer: attention, or what takes its place.

A spec is the values that decide which operations it consists of; `recurrent_specs.py` has those of
layers with a state, `specs.py` those of whole layers. This module must not import torch: front ends
import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from shmllm.models.bias_specs import DistanceBiases, LinearBiases, RelationBiases
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.indexer_specs import BlockIndexerSpec, Chosen, IndexerSpec
from shmllm.models.kv_heads import KVHeads
from shmllm.models.recurrent_specs import (
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvolutionSpec,
)
from shmllm.models.rope_config import RopeConfig
from shmllm_kernels.windows import Window

QKNorm = Literal["head", "each", "row"]
Gate = Literal["sigmoid", "softplus"]


class Reach(Enum):
    """How far behind its own position a token attends, where that is no number of positions."""

    WITHIN_ITEMS = "within items"


WITHIN_ITEMS: Final = Reach.WITHIN_ITEMS
"""As far as the end of the item, say an image, that the token belongs to. A token of no item
attends to none behind its own."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A token attends to the first positions of its request, those that an encoder has computed,
    and to no others: cross-attention.

    Attributes:
        text_begins: the position of the first token of the text.
    """

    text_begins: int


Ahead = int | Reach | Encoded | None


class Growth(NamedTuple):
    """The factor of queries ``1 + rate * log(1 + floor((position + offset) / length))`` (Llama 4),
    times ``(1 + (position + offset) / length) ** power`` (Beam).

    Attributes:
        rate: the factor of the logarithm.
        length: the number of positions that have the same logarithm.
        offset: added to positions.
        power: the exponent.
    """

    rate: float
    length: int
    offset: int = 0
    power: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer.

    Attributes:
        num_heads: the number of query heads, a multiple of `num_kv_heads`.
        num_kv_heads: the number of key heads, and of value heads.
        head_dim: the width of a query head, and of a key head.
        value_dim: the width of a value head; None: that of a key head.
        window: the number of positions that a token attends to, its own included and those behind
            it not, or the chunk that they are in; None: its own and all before it.
        ahead: the number of positions behind its own that a token attends to; 0: none, the
            attention is causal; None: all that the request has; or WITHIN_ITEMS; or `Encoded`.
        rope: the rotation of queries and keys; None: they are not rotated.
        scale: the factor of the scores.
        soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)``; None: they stay.
        sinks: whether each head has a weight that joins the softmax's denominator.
        biases: what is added to capped scores by distance, or by query, key and distance; None:
            nothing.
        qk_norm: which norm queries and keys have: None, one over each "head", one over "each" with
            weights of its own, or one over the "row" of all heads side by side.
        norms_rotated: whether those of heads are behind the rotation, and not before it.
        norms_have_bias: whether these are LayerNorms of each head with a bias.
        norms_have_weights: whether the norms of queries and keys have weights.
        weighs_queries: whether that of queries has, if that of keys has.
        growth: the factor of queries behind their rotation; None: they have none.
        clip: the bound of the numbers of queries, keys and values on both sides, before their norms
            and rotation; None: there is none.
        bias: whether the projections to queries, keys and values have a bias.
        key_bias: whether that to keys has one, too.
        output_scale: the factor of what the output projection reads.
        output_norm: whether what it reads has a norm, over all heads.
        output_bias: whether the output projection has a bias.
        gated: whether the output is multiplied by a function of gates before the output projection.
        gate: the function.
        gates_of_heads: whether there is a gate for each head, and not for each element of it.
        gates_apart: whether a checkpoint has the projection to the gates by itself, and not that of
            each head behind the head's query.
        own_gates: whether the output is multiplied by sigmoids of gates, one for each element,
            which a product of their own makes, with a bias for each head.
        value_norm: whether values have an RMSNorm over each head, without a weight.
        keys_are_values: whether a checkpoint has one projection for keys and values.
        source: the layer whose keys and values this one reads instead of its own, which it then has
            no projections for; None: it has its own.
        input_width: the width of what queries, keys and values are projections of; None: that of a
            hidden state.
        indexer: what chooses the blocks of keys that a token attends to; None: these are all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: Window | None = None
    ahead: Ahead = 0
    rope: RopeConfig | None = None
    scale: float
    soft_cap: float | None = None
    sinks: bool = False
    biases: DistanceBiases | LinearBiases | RelationBiases | None = None
    qk_norm: QKNorm | None = None
    norms_rotated: bool = False
    norms_have_bias: bool = False
    norms_have_weights: bool = True
    weighs_queries: bool = True
    growth: Growth | None = None
    clip: float | None = None
    bias: bool = False
    key_bias: bool = True
    output_scale: float = 1.0
    output_norm: bool = False
    output_bias: bool = False
    gated: bool = False
    gate: Gate = "sigmoid"
    gates_of_heads: bool = False
    gates_apart: bool = False
    own_gates: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    source: int | None = None
    input_width: int | None = None
    indexer: BlockIndexerSpec | None = None

    state_bytes = 0

    @property
    def width(self) -> int:
        """The width of the attention's output, which the output projection reads."""
        return self.num_heads * self.value_head_dim

    @property
    def value_head_dim(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def query_width(self) -> int:
        """The width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """The width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """The width of all value heads."""
        return self.num_kv_heads * self.value_head_dim

    @property
    def in_width(self) -> int:
        """The width of queries, keys, values and gates side by side."""
        own = self.key_width + self.value_width if self.source is None else 0
        return self.query_width + own + self.gate_width

    @property
    def gate_width(self) -> int:
        """The width of all gates."""
        if not self.gated:
            return 0
        return self.num_heads if self.gates_of_heads else self.width

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before the attention, and of its gates."""
        widths = self.in_width, self.own_gates * self.width, sum(self.index_widths)
        return tuple(width for width in widths if width)

    @property
    def index_widths(self) -> tuple[int, int]:
        """The widths of an indexer's queries, side by side, and of its key; 0: it has none."""
        dim = 0 if self.indexer is None else self.indexer.head_dim
        return self.num_kv_heads * dim, dim

    @property
    def chosen(self) -> Chosen | None:
        """How much a token attends to at most; None: all that it sees."""
        return None if self.indexer is None else self.indexer.chosen(self.num_kv_heads)

    @property
    def kv(self) -> KVHeads:
        """What the attention reads of each token in the cache."""
        index_dim = self.index_widths[1]
        return KVHeads(self.num_kv_heads, self.head_dim, self.value_head_dim, index_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """A latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). Keys and values of all
    heads are projections of one latent, which is all that the cache holds, beside a key part that
    carries the position.

    Attributes:
        num_heads: the number of heads.
        rank: the width of a latent.
        nope_dim: the width of that part of a query which does not rotate.
        rope_dim: the width of the part that rotates, and of the key part.
        value_dim: the width of a head's value.
        query_rank: the width of what queries are a projection of, which has a norm; None: they are
            a projection of the hidden state.
        rope: the rotation.
        scale: the factor of the scores.
        bias: whether the projections to `query_rank`, to the latent, and of the output have a bias.
            Queries have none.
        norm_eps: the eps of the norms of latents and of `query_rank`, which is that of other norms
            in few families.
        growth, sinks: see `AttentionSpec`.
        gated: whether the output of each head is multiplied by the sigmoid of a gate, a projection
            of the hidden state without a bias.
        gates_per_head: how many gates of this kind a head has: 1, or one for each element.
        gates_of_elements: whether the output is multiplied by sigmoids of gates, one for each
            element. Gates and queries are then projections of what has the width `query_rank`,
            with its norm and as it is, side by side.
        kv_apart: whether a checkpoint has the projections of latents to keys, transposed, and to
            values apart, with the heads in a dimension of their own, as in GGUF files.
        indexer: what chooses the tokens that a token attends to; None: these are all before it.
    """

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    rope: RopeConfig
    scale: float
    bias: bool = False
    norm_eps: float = 1e-6
    growth: Growth | None = None
    sinks: bool = False
    gated: bool = False
    gates_per_head: int = 1
    gates_of_elements: bool = False
    kv_apart: bool = False
    indexer: IndexerSpec | None = None

    state_bytes = 0

    @property
    def chosen(self) -> Chosen | None:
        """How much a token attends to at most; None: all before it."""
        return None if self.indexer is None else Chosen(1, self.indexer.top_k)

    @property
    def width(self) -> int:
        """The width of all heads' values, which the output projection reads."""
        return self.num_heads * self.value_dim

    @property
    def query_width(self) -> int:
        """The width of all queries."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def latent_width(self) -> int:
        """The width of all queries, projected to the width of a latent."""
        return self.num_heads * self.rank

    @property
    def key_dim(self) -> int:
        """The width of a latent and of a key part."""
        return self.rank + self.rope_dim

    @property
    def first_widths(self) -> tuple[int, ...]:
        """The widths of what one product makes of the hidden state: `query_rank`, or queries if the
        others have no bias either, and last a latent with its key part."""
        if self.query_rank is not None:
            return self.query_rank, self.key_dim
        return (self.key_dim,) if self.bias else (self.query_width, self.key_dim)

    @property
    def in_width(self) -> int:
        """The width of all of these."""
        return sum(self.first_widths)

    @property
    def joined_rank(self) -> int:
        """The width of what `query_rank` says, beside itself; 0: queries read no such thing."""
        return 2 * (self.query_rank or 0) if self.gates_of_elements else 0

    @property
    def up_widths(self) -> tuple[int, ...]:
        """The widths of queries and, if these are made by the same product, gates."""
        gates = (self.width,) if self.gates_of_elements else ()
        return (self.query_width, *gates)

    @property
    def projects_queries(self) -> bool:
        """Whether queries are a product of their own."""
        return self.query_rank is not None or self.bias

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before the attention."""
        queries = (sum(self.up_widths),) if self.projects_queries else ()
        of_index: tuple[int, ...] = ()
        if (indexer := self.indexer) is not None and not indexer.is_shared:
            heads, dim = indexer.num_heads, indexer.head_dim
            of_index = dim, heads, heads * dim
        gates = (self.num_heads * self.gates_per_head,) if self.gated else ()
        return (self.in_width, *queries, *of_index, *gates)

    @property
    def read_widths(self) -> tuple[int, ...]:
        """The widths of what products read, but for the hidden state and `width`."""
        ranks = {self.query_rank or 0, self.joined_rank} - {0}
        return (*ranks, *self.linear_widths, self.latent_width)

    @property
    def kv(self) -> KVHeads:
        """What the attention reads of each token in the cache."""
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return KVHeads(1, self.key_dim, 0, index_dim)


AnyAttention = AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec
"""What reads keys of the tokens before."""

MixerSpec = (
    AttentionSpec
    | LatentAttentionSpec
    | CompressedAttentionSpec
    | DeltaNetSpec
    | KimiDeltaSpec
    | LightningSpec
    | Mamba2Spec
    | MambaSpec
    | ShortConvolutionSpec
)
"""What mixes a layer's tokens. Each has `width`, what its output projection reads, `linear_widths`,
`state_bytes`, the size of a request's recurrent state in the layer, and `kv`, what its layer reads
of each token in the KV cache, or None."""


def shares_choice(mixer: MixerSpec) -> bool:
    """Returns whether a mixer reads what an indexer of another layer has chosen."""
    indexer = mixer.indexer if isinstance(mixer, LatentAttentionSpec) else None
    return indexer is not None and indexer.is_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySideSpec:
    """Mixers of one layer that read the same norm, and whose outputs are added to the residual
    stream (Falcon-H1).

    Attributes:
        mixers: the mixers. At most one has keys and values, and at most one a state.
        scales: the factor of the output of each, in place of `ModelConfig.residual_scale`.
    """

    mixers: tuple[MixerSpec, ...]
    scales: tuple[float, ...]
