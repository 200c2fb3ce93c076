"""Launches all layers of a dense decoder as one kernel, for a step of up to eight tokens.

The launch is cooperative: all of its programs run at the same time, since they wait for each other
(`grid_meeting`). What differs from layer to layer is read from a table on the device, which has the
addresses of weights, caches and inputs: all of them must stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from shmllm_kernels.gpu.attention import AttentionScratch, checked, scales_of
from shmllm_kernels.gpu.configs import AttentionConfig, next_power_of_two
from shmllm_kernels.gpu.decode_attention import MAX_TOKENS, constants_of
from shmllm_kernels.gpu.decode_operands import (
    HeadNumbers,
    HeadStrides,
    LayerHeads,
    PartMemory,
    Step,
)
from shmllm_kernels.gpu.decoder_kernel import Norm, Sizes, Streams, decode_layers
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.float8 import as_stored
from shmllm_kernels.gpu.norm import add_normed
from shmllm_kernels.gpu.rotated_heads import NORM_BEFORE
from shmllm_kernels.gpu.row_configs import DecoderConfig
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.windows import Window, window_number

ALIGNMENT = 16
"""What the addresses of operands are divisible by, in bytes."""
MAY_LIE_ANYWHERE = ("table", "slots")
MAY_DIFFER = ("cos", "sin", "window")
"""What some layers have and others have not."""
NEED_NOT_BE_CONTIGUOUS = ("keys", "values", "table", "slots", "cos", "sin")
NO_WINDOW = 2**30
MAX_HEAD_DIM = 256
MAX_TILE, MAX_TILE_ELEMENTS = 64, 8192
"""The most keys at a time, and elements of them, that fit into registers beside what a program
keeps of a layer."""


@dataclass(frozen=True, slots=True)
class LayerOperands:
    """What a launch reads and writes in one layer; all weights contiguous, in the model's dtype.

    Attributes:
        mixer_norm: [hidden], the weight of the RMSNorm before the projections to heads.
        qkv: [(num_heads + 2 * num_kv_heads) * dim, hidden].
        qkv_bias: one for each of its rows, or None.
        output: [hidden, num_heads * dim]; output_bias: [hidden], or None.
        mlp_norm: [hidden].
        gate_up: [2 * inner, hidden], or [inner, hidden] if the activation has no gate.
        gate_up_bias: one for each of its rows, or None.
        down: [hidden, inner]; down_bias: [hidden], or None.
        mixer_post, mlp_post: [hidden], the weights of norms behind attention and behind the MLP,
            before what they return is added to the residual stream; or None.
        keys, values: [blocks, block_size, num_kv_heads, dim], as `decode_attention` takes them.
        table: [requests, blocks of a request] int32, the block table.
        slots: [tokens] int64.
        cos, sin: [tokens, rotary_dim], or None: nothing is rotated.
        query_norm, key_norm: [dim], the weights of norms of each head, or None.
        window: see `paged_attention`.
    """

    mixer_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    mixer_post: Tensor | None
    mlp_post: Tensor | None
    keys: Tensor
    values: Tensor
    table: Tensor
    slots: Tensor
    cos: Tensor | None
    sin: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: Window | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What all layers of a launch have in common: which operands there are, their shapes, and
        the strides of those that need not be contiguous."""
        names = (field.name for field in fields(self) if field.name not in MAY_DIFFER)
        shapes = (getattr(getattr(self, name), "shape", None) for name in names)
        return (*shapes, self.keys.stride(), self.values.stride(), self.table.stride())


@dataclass(frozen=True, slots=True)
class DecoderNumbers:
    """The numbers that all layers have in common.

    Attributes:
        eps: what norms of the residual stream, and those behind blocks, add to the mean square.
        offset: what they add to their weights.
        head_eps, head_offset: the same of norms of heads.
        attention_scale: the factor of scores.
        residual_scale: the factor of what is added to the residual stream.
        activation: the activation of the MLP.
        interleaved: whether neighbouring elements of heads are rotated together.
        soft_cap: the cap of scores, or None.
    """

    eps: float
    offset: float
    head_eps: float
    head_offset: float
    attention_scale: float
    residual_scale: float
    activation: Activation
    interleaved: bool
    soft_cap: float | None = None


class DecoderLayers:
    """The layers of a decoder as a launch reads them.

    Args:
        layers: what each of them has; all of one `kind`, but for those that rotate nothing.
        numbers: what they have in common.

    Attributes:
        first: the first layer that rotates, or else the first one, for shapes and dtypes.
        numbers: as given.
        table: [layers, NUM_COLUMNS] int64 on the device, a row of addresses for each layer.
        last_post: the weight of the norm behind the last layer's MLP, or None.
        has_window: whether a layer has a window.
    """

    def __init__(self, layers: Sequence[LayerOperands], numbers: DecoderNumbers) -> None:
        assert len({layer.kind for layer in layers}) == 1, "all layers have the same shapes"
        self.first = next((layer for layer in layers if layer.cos is not None), layers[0])
        self.numbers = numbers
        self.last_post = layers[-1].mlp_post
        self.has_window = any(layer.window is not None for layer in layers)
        _check(self.first, numbers.activation.is_gated)
        self._kept = layers, _unrotated(self.first)
        rows = [_row(layer, *self._kept[1]) for layer in layers]
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.first.qkv.device)


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """What a launch writes besides the residual stream and the cache.

    Attributes:
        heads: [tokens or more, (num_heads + 2 * num_kv_heads) * dim], contiguous.
        attended: [tokens or more, num_heads * dim], contiguous.
        activated: [tokens or more, inner], contiguous.
        counters: [2] int32, both 0, as a launch leaves them.
        spare: [tokens or more, hidden], contiguous; the other place of the residual stream, if
            blocks have norms behind them.
        products: [2, MAX_ROWS, hidden], contiguous, the first half 0; likewise.
    """

    heads: Tensor
    attended: Tensor
    activated: Tensor
    counters: Tensor
    spare: Tensor | None = None
    products: Tensor | None = None


def run_layers(
    residual: Tensor,
    layers: DecoderLayers,
    memory: DecoderMemory,
    query_starts: Tensor,
    context_lens: Tensor,
    config: DecoderConfig,
    attention: AttentionConfig,
    programs: int,
    num_splits: int = 1,
    scratch: AttentionScratch | None = None,
    max_tokens: int = 1,
    asks_cache: bool = False,
) -> None:
    """Computes what `few_rows.multiply_rows` and `decode_attention`, five launches a layer, do.

    Args:
        residual: [tokens, hidden], contiguous, up to MAX_ROWS tokens; changed in place.
        layers: the layers.
        memory: the memory of the launch.
        query_starts, context_lens, num_splits, scratch, max_tokens: see `decode_attention`.
        config: the tiles of products, and the warps and stages of all.
        attention: the tiles of attention.
        programs: the number of programs, no more than the device runs at once.
        asks_cache: whether programs ask the L2 cache for weights while they wait, from compute
            capability 9.0 on.

    It reads all weights once and has five meetings a layer, of 1.06 us each on an H200 (measured).
    While a program waits, 32 KiB of weights are on their way into its registers, which takes 1.0 us
    for 132 programs, and it has asked the cache for ``config.ahead`` times as many: 17 MB, 4 us.
    Llama-3.2-1B there, one request at a context of 1,090 tokens (to be confirmed or refuted):

    ================================  ==================  ==============================
    us a step                         asking nothing      asking for 4 iterations
    ================================  ==================  ==============================
    bytes of 16 layers, 4.26 TB/s     457                 457
    64 meetings before products       77: rows, weights   26: rows, 0.4 each
    16 attentions, 7 us each          112                 48: the cache gets the rest
    head                              127                 127
    embedding, inputs, sampling       42                  42
    all                               815: share 0.71     700: share 0.83
    ================================  ==================  ==============================

    Five launches a layer take 835 us by the same arithmetic. Asking for each line of a matrix cost
    4 us a launch; here a request is for 2 KiB, and nobody has measured one.
    """
    (tokens, hidden), first, numbers = residual.shape, layers.first, layers.numbers
    num_kv_heads, dim = first.keys.shape[2:]
    num_heads, inner = first.output.shape[1] // dim, first.down.shape[1]
    assert tokens <= MAX_ROWS, f"at most {MAX_ROWS} tokens"
    assert 1 <= max_tokens <= MAX_TOKENS, f"a request of {max_tokens} tokens: at most {MAX_TOKENS}"
    assert residual.is_contiguous(), "the residual stream is contiguous"
    assert memory.counters.shape == (2,), "two counters"
    if tokens == 0:
        return
    spare, products, has_posts = memory.spare, memory.products, first.mlp_post is not None
    if spare is None or products is None:
        assert not has_posts, "norms behind blocks need memory"
        spare = products = residual
    parts = PartMemory(residual, residual, memory.counters)
    if num_splits > 1:
        scratch = checked(scratch, tokens, num_heads, num_splits, dim)
        parts = PartMemory(scratch.sums, scratch.stats, scratch.counters)
    slots, dtype = first.slots, residual.dtype
    cos, sin = (slots, slots) if first.cos is None or first.sin is None else (first.cos, first.sin)
    block_stride, token_stride, kv_head_stride, _ = first.keys.stride()
    norms = (
        (residual, residual)
        if first.query_norm is None or first.key_norm is None
        else (first.query_norm, first.key_norm)
    )
    stored = as_stored(first.keys, dtype), as_stored(first.values, dtype)
    width = first.qkv.shape[0]
    step = 2 * config.depth * config.num_warps
    lengths = hidden, num_heads * dim, inner
    are_aligned = not any(k * residual.itemsize % ALIGNMENT for k in lengths)
    decode_layers[(programs,)](
        layers.table,
        memory.counters,
        Streams(residual, memory.heads, memory.attended, memory.activated, spare, products),
        Sizes(tokens, len(context_lens), len(layers.table), hidden, width, num_heads * dim, inner),
        Norm(numbers.eps, numbers.offset),
        numbers.residual_scale,
        Step(query_starts, context_lens),
        LayerHeads(
            residual, residual, residual, *stored, first.table, slots, cos, sin, *norms, residual
        ),
        HeadStrides(
            num_heads * dim,
            width,
            cos.stride(0),
            sin.stride(0),
            block_stride,
            token_stride,
            kv_head_stride,
            first.table.stride(0),
            0,
        ),
        HeadNumbers(
            *scales_of(numbers.attention_scale, numbers.soft_cap),
            numbers.head_eps,
            numbers.head_offset,
        ),
        parts,
        **constants_of(attention, num_heads, num_kv_heads, (dim, dim), num_splits, max_tokens),
        IS_FIRST=dtype is torch.float16,
        HAS_QKV_BIAS=first.qkv_bias is not None,
        HAS_OUTPUT_BIAS=first.output_bias is not None,
        HAS_MLP_BIAS=first.down_bias is not None,
        HAS_POSTS=has_posts,
        HAS_POST_OFFSET=has_posts and numbers.offset != 0,
        NAME=numbers.activation.name,
        IS_GATED=numbers.activation.is_gated,
        IS_WHOLE=not any(k % step for k in lengths),
        AHEAD=config.ahead if are_aligned and asks_cache else 0,
        BLOCK_N=config.block_n,
        ROWS=MAX_ROWS,
        SLICES=config.num_warps,
        DEPTH=config.depth,
        HAS_WINDOW=layers.has_window,
        HAS_CAP=numbers.soft_cap is not None,
        ROTARY_HALF=0 if first.cos is None else first.cos.shape[-1] // 2,
        IS_INTERLEAVED=numbers.interleaved,
        NORM=NORM_BEFORE.value if first.query_norm is not None else 0,
        ROUNDS_ONCE=numbers.head_offset != 0,
        BLOCK_SIZE=first.keys.shape[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_cooperative_grid=True,
    )
    if layers.last_post is not None:
        last = products[1, :tokens]
        options = numbers.eps, numbers.residual_scale, numbers.offset
        add_normed(last, residual, layers.last_post, *options)


def attention_tile(config: AttentionConfig, dim: int) -> AttentionConfig:
    """Returns the tiles of attention in a launch, made of those of a launch of its own, for heads
    of some elements."""
    most = min(MAX_TILE, MAX_TILE_ELEMENTS // next_power_of_two(dim))
    return replace(config, tile=min(config.tile, most))


def splits_at_once(num_splits: int, programs: int, requests: int, num_kv_heads: int) -> int:
    """Returns into how many parts a launch splits contexts: no more than a launch of its own, and
    no more than its programs compute at once."""
    at_once = max(programs // (requests * num_kv_heads), 1)
    return min(num_splits, next_power_of_two(at_once + 1) // 2)


def _check(layer: LayerOperands, is_gated: bool) -> None:
    dim, num_kv_heads = layer.keys.shape[3], layer.keys.shape[2]
    (width, hidden), (_, inner) = layer.qkv.shape, layer.down.shape
    num_heads = layer.output.shape[1] // dim
    assert width == (num_heads + 2 * num_kv_heads) * dim, "qkv: query, key and value heads"
    assert layer.output.shape == (hidden, num_heads * dim), "output: [hidden, query heads]"
    assert layer.gate_up.shape == ((2 if is_gated else 1) * inner, hidden), "gate_up: [.., hidden]"
    assert layer.down.shape == (hidden, inner), "down: [hidden, inner]"
    assert layer.mixer_norm.shape == layer.mlp_norm.shape == (hidden,), "norms: [hidden]"
    assert (layer.gate_up_bias is None) == (layer.down_bias is None), "an MLP has both biases"
    assert (layer.mixer_post is None) == (layer.mlp_post is None), "both blocks have norms"
    assert (layer.query_norm is None) == (layer.key_norm is None), "heads have both norms"
    assert layer.keys.stride() == layer.values.stride(), "keys and values have the same strides"
    assert layer.slots.dtype is torch.int64, "slots are int64"


def _unrotated(layer: LayerOperands) -> tuple[Tensor | None, Tensor | None]:
    """Returns angles with which heads stay as they are, in the shape of a layer's."""
    if layer.cos is None:
        return None, None
    return torch.ones_like(layer.cos), torch.zeros_like(layer.cos)


def _row(layer: LayerOperands, cos: Tensor | None, sin: Tensor | None) -> list[int]:
    """Returns a layer's row of the table.

    Args:
        layer: the layer.
        cos, sin: its angles, if it has none.
    """
    operands = {field.name: getattr(layer, field.name) for field in fields(layer)[:-1]}
    if layer.cos is None:
        operands |= {"cos": cos, "sin": sin}
    row = []
    for name, tensor in operands.items():
        address = 0 if tensor is None else tensor.data_ptr()
        assert name in MAY_LIE_ANYWHERE or address % ALIGNMENT == 0, f"{name} is not aligned"
        assert name in NEED_NOT_BE_CONTIGUOUS or tensor is None or tensor.is_contiguous(), name
        row.append(address)
    return [*row, NO_WINDOW if layer.window is None else window_number(layer.window)]
