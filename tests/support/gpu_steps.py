"""Runs steps of requests through a `GpuProgram`, without a scheduler and without a sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from support.cache_shapes import cache_shape
from support.item_models import item_ends_of
from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.config.load import DecodeKernel
from shmllm.core.plan import BlockAppend, NewRequest, StepPlan
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model, stored_parts
from shmllm.models.rope_config import count_axes
from shmllm.models.weights import load_weights, stored_kinds
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache, block_bytes, cache_bytes
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, GraphDispatcher
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.program import GpuProgram
from shmllm.worker.grid_positions import GridPositions
from shmllm.worker.rope_positions import PlacedGrid, RopePositions
from shmllm.worker.step_inputs import StepInputs

BLOCK_SIZE = 8
MAX_LENGTH = 64
WRONG_INPUTS = {
    "token_ids": 5,
    "positions": 7,
    "query_starts": 1,
    "context_lens": MAX_LENGTH,
    "rows": 1,
    "sample_tokens": 1,
    "sample_rows": 1,
    "sample_positions": 1,
}


@dataclass
class Prepared:
    """A step whose inputs were sent to the device."""

    mode: CudaGraphMode
    descriptor: BatchDescriptor
    max_query_len: int
    inputs: StepInputs
    plan: StepPlan


class GpuSteps:
    """A model on a device, and its requests.

    Attributes:
        tokens: by row, the tokens known so far.
        computed: by row, how many of these tokens have keys and values in the cache.
        second_segments: by row, the index of the first token of the second text of a pair.
        items: by row, the images of a request, see `RopePositions`.
    """

    def __init__(
        self,
        device: Device,
        directory: Path,
        mode: str = "NONE",
        sizes: tuple[int, ...] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        max_tokens: int = 24,
        max_requests: int = 4,
        deterministic: bool = False,
        max_drafts: int = 0,
        max_verified: int = 0,
        config: ModelConfig | None = None,
        decode_kernel: DecodeKernel = "auto",
    ) -> None:
        config = config or ModelConfig.from_directory(directory)
        where = device.torch_device

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            garbage = math.nan if dtype.is_floating_point else 77
            return torch.full(shape, garbage, dtype=dtype, device=where)

        self.device = device
        stored = stored_parts(config, stored_kinds(directory, config.tie_word_embeddings))
        self.model = create_model(config, dtype, allocate, None, stored)
        load_weights(self.model, directory)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.second_segments: dict[int, int] = {}
        self.items: dict[int, list[PlacedGrid]] = {}
        self.last_tokens = torch.full((max_requests,), -99, dtype=torch.int64, device=where)
        shape = cache_shape(config, BLOCK_SIZE, lambda heads: block_bytes(heads, BLOCK_SIZE, dtype))
        num_groups = len(shape.groups)
        self.batch = InputBatch(
            max_requests,
            MAX_LENGTH,
            BLOCK_SIZE,
            config.vocab_size,
            num_groups,
            max_drafts=max_drafts,
            patches_per_side=int(count_axes(config.ropes) > 0),
        )
        max_blocks = MAX_LENGTH // BLOCK_SIZE
        num_blocks = 1 + max_requests * max_blocks * num_groups
        self._free = list(np.random.default_rng(5).permutation(np.arange(1, num_blocks)))
        self._blocks: dict[int, list[list[int]]] = {}
        self._num_groups = num_groups
        self._assigned: set[int] = set()
        self._step = 0
        self._last_decodes: list[int] = []
        num_bytes = cache_bytes(shape, dtype, num_blocks, num_blocks)
        arena = device.make_arena(num_bytes, "the cache")
        self.cache = GpuKVCache(config, dtype, shape, num_blocks, arena, num_blocks)
        for states in self.cache.states.values():
            states.fill_(math.nan)
        self._stored = [*self.cache.layers.values(), *self.cache.entries.values()]
        for part in (part for _, *layer in self._stored for part in layer):
            part.fill_(math.nan)
        self.inputs = GpuInputs(
            max_tokens,
            max_requests,
            self.batch.max_samples,
            max_blocks,
            num_groups,
            self.last_tokens,
            device,
            tuple(dict.fromkeys(each.ahead for each in config.attentions if each.ahead != 0)),
            config.num_token_types > 0,
            count_axes(config.ropes),
        )
        self.buffers = GpuBuffers(
            config, dtype, max_tokens, max_requests, self.batch.max_samples, device, deterministic,
            max_verified, MAX_LENGTH, BLOCK_SIZE,
        )  # fmt: skip
        self.dispatcher = GraphDispatcher(
            CudaGraphMode.parse(mode),
            sizes,
            max_requests,
            max_tokens,
            None,
            max_drafts,
            max_verified,
        )
        self.program = GpuProgram(
            self.model,
            self.cache,
            self.inputs,
            self.buffers,
            device,
            self.dispatcher,
            decode_kernel=decode_kernel,
        )

    def add(self, row: int, tokens: list[int]) -> None:
        """Add a request, whose first step assigns it to that row."""
        self._free += [block for ids in self._blocks.pop(row, []) for block in ids]
        self._assigned.discard(row)
        self.tokens[row], self.computed[row] = list(tokens), 0

    def invent_context(self, row: int, length: int) -> None:
        """Fill the keys and values of the row's first tokens with random numbers."""
        self._grow(row, length)
        self.computed[row] = length
        generator = torch.Generator().manual_seed(row)
        for group, part in ((group, part) for group, *kv in self._stored for part in kv):
            blocks = self._blocks[row][group]
            shape = (len(blocks), *part.shape[1:])
            numbers = torch.randn(shape, generator=generator).to(self.device.torch_device)
            for block, content in zip(blocks, numbers, strict=True):
                part[block].copy_(content)

    def prepare(
        self,
        work: dict[int, int],
        *,
        feeds_itself: bool = False,
        drafts: dict[int, list[int]] | None = None,
    ) -> Prepared:
        """Send the inputs of a step to the device.

        Args:
            work: by row, the number of tokens to compute.
            feeds_itself: whether the tokens are those that the device has in `last_tokens`.
            drafts: by row, drafted tokens to compute besides.
        """
        plan = self._plan(work, drafts or {})
        self.batch.update(plan)
        if isinstance(self.batch.rope_positions, RopePositions | GridPositions):
            for request in plan.new_requests:
                grids = self.items.get(request.row, ())
                self.batch.rope_positions.update(request.row, grids, request.token_ids)
        inputs = self.batch.inputs(plan)
        if self.items:
            ends = {row: item_ends_of(self.items.get(row, ()), MAX_LENGTH) for row in work}
            places = zip(
                np.repeat(inputs.rows, inputs.counts).tolist(), inputs.positions, strict=True
            )
            inputs.item_ends = np.array([ends[row][position] for row, position in places])
        if feeds_itself:
            inputs.token_ids[:] = -2 - inputs.rows
        longest = max(plan.counts)
        mode, descriptor = self.dispatcher.dispatch(
            plan.num_tokens, len(work), longest == 1, plan.num_drafts
        )
        self._spoil_inputs(plan)
        self.inputs.change_blocks(self.inputs.changes_of(plan))
        self.inputs.send(inputs, descriptor, plan.is_repeat)
        return Prepared(mode, descriptor, longest, inputs, plan)

    def _spoil_inputs(self, plan: StepPlan) -> None:
        """Fill the device's inputs with wrong values that no kernel crashes at, so that inputs
        which are not sent give wrong results."""
        for name, value in WRONG_INPUTS.items():
            getattr(self.inputs.step, name).fill_(value)
        step = self.inputs.step
        for numbers in (step.token_types, step.ends, step.rope_positions):
            numbers.fill_(1)
        self.inputs.step.slots.fill_(self._blocks[plan.rows[0]][0][0] * BLOCK_SIZE)
        if not plan.is_repeat:
            self.inputs.block_tables.fill_(1)

    def _plan(self, work: dict[int, int], drafts: dict[int, list[int]]) -> StepPlan:
        self._step += 1
        plan = StepPlan(self._step)
        for row, count in work.items():
            start, tokens = self.computed[row], self.tokens[row]
            if drafted := drafts.get(row, []):
                plan.drafts[len(plan.rows)] = drafted
                tokens, count = tokens + drafted, count + len(drafted)
            new = self._grow(row, start + count)
            blocks = [list(ids) for ids in self._blocks[row]]
            if row not in self._assigned:
                self._assigned.add(row)
                second = self.second_segments.get(row, 0)
                request = NewRequest(
                    row, tokens, blocks, SamplingParams(), 0, 0, (), second_segment=second
                )
                plan.new_requests.append(request)
            elif new[0]:
                first = len(blocks[0]) - len(new[0])
                plan.block_appends.append(BlockAppend(row, [first] * len(new), new))
            if start + count == len(tokens):
                plan.samples.append(len(plan.rows))
                plan.num_sampled += 1 + len(drafted)
            plan.rows.append(row)
            plan.starts.append(start)
            plan.counts.append(count)
        plan.num_tokens = sum(plan.counts)
        is_decode = len(plan.samples) == plan.num_tokens
        has_new = bool(plan.new_requests)  # a prompt of one token is a decode of another request
        plan.is_repeat = is_decode and not has_new and list(work) == self._last_decodes
        self._last_decodes = list(work) if is_decode else []
        return plan

    def _grow(self, row: int, length: int) -> list[list[int]]:
        """Allocate blocks for so many tokens, and return the new ones of each group."""
        blocks = self._blocks.setdefault(row, [[] for _ in range(self._num_groups)])
        count = -(-length // BLOCK_SIZE) - len(blocks[0])
        new = [[int(self._free.pop()) for _ in range(count)] for _ in blocks]
        for ids, appended in zip(blocks, new, strict=True):
            ids += appended
        return new

    def run(self, step: Prepared, mode: CudaGraphMode | None = None) -> tuple[Tensor, Tensor]:
        """Compute a step, in its own mode or in another one. Returns its hidden states and logits
        on the host, without those of the padding."""
        hidden, logits = self.program.run(mode or step.mode, step.descriptor, step.max_query_len)
        num_tokens, num_samples = step.plan.num_tokens, len(step.inputs.sample_tokens)
        return self.on_host(hidden[:num_tokens]), self.on_host(logits[:num_samples])

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor on the host, after all work is done."""
        self.device.synchronize()
        return tensor.cpu()

    def finish(self, step: Prepared, logits: Tensor) -> dict[int, Tensor]:
        """Append the most likely token to each sampled row, and return the rows' logits."""
        self.append(step, logits.argmax(-1))
        rows = step.inputs.sample_rows.tolist()
        for row in rows:
            self.last_tokens[row] = self.tokens[row][-1]
        return dict(zip(rows, logits.float(), strict=True))

    def append(self, step: Prepared, sampled: Tensor) -> None:
        """Append these tokens, the first for each sampled row: no drafted one is accepted."""
        self.batch.append(step.inputs, sampled.numpy())
        for index, (row, count) in enumerate(zip(step.plan.rows, step.plan.counts, strict=True)):
            self.computed[row] += count - len(step.plan.drafts.get(index, ()))
        rows = step.inputs.sample_rows.tolist()
        for place, (row, token) in enumerate(zip(rows, sampled.tolist(), strict=True)):
            if row not in rows[:place]:
                self.tokens[row].append(token)

    def step(self, work: dict[int, int]) -> dict[int, Tensor]:
        """Compute a step, and return the logits of the rows' last tokens."""
        prepared = self.prepare(work)
        return self.finish(prepared, self.run(prepared)[1])

    def poison(self) -> None:
        """Fill the buffers with NaN, since a step must not read what an earlier one left there."""
        parts = [*vars(self.buffers).values(), *self.buffers._products.values()]
        for part in parts:
            if isinstance(part, Tensor) and part.is_floating_point():
                part.fill_(math.nan)
