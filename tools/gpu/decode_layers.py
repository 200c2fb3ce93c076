"""Computes the layers of a model for some decodes as an engine does, to measure candidates.

This module must not know what a candidate is, nor how it is measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu.attention_case import in_order
from gpu.clock import seconds_each
from gpu.settings import Settings
from shmllm_kernels.gpu import few_rows, single_row
from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import (
    AttentionConfig,
    attention_config,
    has_dependent_launches,
    has_heads_first,
    num_splits,
)
from shmllm_kernels.gpu.decode_attention import decode_attention
from shmllm_kernels.gpu.decoder import DecoderMemory, DecoderNumbers, LayerOperands
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.gpu.weights_ahead import WeightsAhead

MODELS = {2048: "1b", 16_384: "8b"}
"""For each size of the table the model whose layers are measured."""
ROWS = (1, 8)
"""The numbers of decodes; a rehearsal measures the first one."""
MOST_LAYERS = 8
BLOCK_SIZE = 16


def numbers_of_decodes(settings: Settings) -> tuple[int, ...]:
    """Returns the numbers of decodes that are measured."""
    return ROWS[:1] if settings.rehearsal else ROWS


class DecodeLayers(ABC):
    """The layers of a model for some decodes: no more than MOST_LAYERS, each of which has its own
    weights, so that none finds them in a cache. A subclass says how a candidate computes them.

    Args:
        settings: the sizes.
        name: the name of the model.
        rows: the number of decodes.
    """

    calls = 0.0

    def __init__(self, settings: Settings, name: str, rows: int) -> None:
        self._shape = shape = settings.shape(name)
        self.name, self._rows = f"{name}, {rows} rows", rows
        self._device, self._rounds = torch.device(settings.device), settings.rounds
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        blocks = -(-settings.context // BLOCK_SIZE)
        order = torch.randperm(rows * blocks, device=self._device, dtype=torch.int32)
        self._table = order.view(rows, blocks)
        last = self._table[:, -1].long() * BLOCK_SIZE
        self._slots = last + (settings.context - 1) % BLOCK_SIZE
        self._angles = self._random(2, rows, shape.head_dim).unbind()
        self._starts = torch.arange(rows + 1, device=self._device, dtype=torch.int32)
        self._contexts = torch.full_like(self._starts[1:], settings.context)
        num_layers = min(shape.layers, MOST_LAYERS)
        self._layers = [self._layer(rows * blocks) for _ in range(num_layers)]
        self._numbers = DecoderNumbers(
            shape.eps, 0.0, 0.0, 0.0, shape.head_dim**-0.5, 1.0, Activation("silu", True), False
        )
        width = shape.heads * shape.head_dim
        self._x = self._random(rows, shape.hidden)
        self._stream = self._x.clone()
        self._memory = DecoderMemory(
            self._random(rows, self._layers[0].qkv.shape[0]),
            self._random(rows, width),
            self._random(rows, shape.inner),
            torch.zeros(2, device=self._device, dtype=torch.int32),
        )

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self._device).to(self._dtype)

    def _layer(self, num_blocks: int) -> LayerOperands:
        shape, ones = self._shape, torch.ones(self._shape.hidden)
        matrices = {
            name: self._random(n, k) * k**-0.5
            for name, (n, k) in shape.matrices().items()
            if name != "head"
        }
        norm, (cos, sin) = ones.to(self._device, self._dtype), self._angles
        sizes = num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim
        heads_first = has_heads_first(self._device, shape.head_dim)
        keys, values = (in_order(self._random(*sizes), heads_first) for _ in range(2))
        return LayerOperands(
            norm, matrices["qkv"], None, matrices["o"], None, norm, matrices["gate_up"], None,
            matrices["down"], None, None, None, keys, values,
            self._table, self._slots, cos, sin, None, None, None,
        )  # fmt: skip

    def result(self, config: Any) -> Tensor:
        """Computes two layers: rounding grows in each further one, and Triton compiles for one
        layer, or for a multiple of 16, another kernel than for those that are measured."""
        self._stream.copy_(self._x)
        self._work(config, self._layers[:2])()
        return self._stream.float()

    def seconds(self, config: Any) -> float:
        return seconds_each([self._work(config, self._layers)], self._device, self._rounds)

    @abstractmethod
    def _work(self, config: Any, layers: list[LayerOperands]) -> Callable[[], object]:
        """Returns what computes some layers with a candidate."""

    def _splits(self) -> int:
        shape, config = self._shape, self._attention(False)
        heads = shape.heads, shape.kv_heads
        return num_splits(self._device, config, self._rows, self._rows, *heads)

    def _attention(self, is_split: bool) -> AttentionConfig:
        shape = self._shape
        sizes = shape.head_dim, shape.heads // shape.kv_heads, 1
        return attention_config(self._device, *sizes, self._dtype, is_split)

    def _scratch(self, splits: int) -> AttentionScratch | None:
        if splits == 1:
            return None
        sizes = self._rows, self._shape.heads, splits, self._shape.head_dim
        return AttentionScratch.allocate(*sizes, self._device)

    def _launch(self, layers: list[LayerOperands], num_ahead: int) -> None:
        """Launches what an engine does without the kernel for all layers, five launches a layer.

        Args:
            layers: the layers.
            num_ahead: how many bytes of weights attention asks the L2 cache for.
        """
        shape, memory, numbers = self._shape, self._memory, self._numbers
        is_dependent, splits = has_dependent_launches(self._device), self._splits()
        scratch = self._scratch(splits)
        attended = memory.attended.view(self._rows, shape.heads, shape.head_dim)
        heads = memory.heads.view(self._rows, -1, shape.head_dim)
        for layer in layers:
            ahead = None
            if num_ahead and is_dependent:
                ahead = WeightsAhead.of(num_ahead, layer.output, layer.gate_up, is_gated=True)
            norms = [RowNorm(weight, shape.eps) for weight in (layer.mixer_norm, layer.mlp_norm)]
            self._multiply(memory.heads, self._stream, layer.qkv, norm=norms[0])
            decode_attention(
                attended, heads, layer.keys, layer.values, layer.table, self._starts,
                self._contexts, layer.slots, self._attention(splits > 1), numbers.attention_scale,
                layer.cos, layer.sin, num_splits=splits, scratch=scratch,
                loads_first=is_dependent, is_dependent=is_dependent, ahead=ahead,
            )  # fmt: skip
            self._multiply(self._stream, memory.attended, layer.output, adds=True)
            self._multiply(
                memory.activated, self._stream, layer.gate_up, norm=norms[1],
                activation=numbers.activation,
            )  # fmt: skip
            self._multiply(self._stream, memory.activated, layer.down, adds=True)

    def _multiply(self, out: Tensor, x: Tensor, weight: Tensor, **options: Any) -> None:
        options["is_dependent"] = has_dependent_launches(self._device)
        if self._rows == 1:
            tile = single_row.config_of(weight, self._device)
            single_row.multiply_row(out, x, weight, tile, **options)
        else:
            tiles = few_rows.config_of(weight, self._dtype, self._device)
            few_rows.multiply_rows(out, x, weight, tiles, **options)
