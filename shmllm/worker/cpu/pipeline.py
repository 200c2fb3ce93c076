"""The programs of a stage of a pipeline on a CPU.

Several batches are under way at once, each in another stage. A batch has a slot, which consists of
everything that differs between batches: the inputs, the block tables of its requests, the residual
stream that each stage hands over, and the logits. A stage computes the batches in the order in
which they began, so they share the KV cache and all other buffers.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shmllm.models.decoder import DecoderModel
from shmllm.models.entries import entry_ropes
from shmllm.models.rope_config import count_axes
from shmllm.worker.arrays import IntArray
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu.buffers import SCORED_ROWS, CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.embeddings import record_gather
from shmllm.worker.cpu.group import Link
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.logits_ops import CpuLogitsOps
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.group import Group, Kind
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu import KernelProgram


class _SlotMemory:
    """The memory of a group, with names of its own for each slot.

    Attributes:
        step: (1,) int64, the number of the slot's step.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self.step = self.array("step", 1)

    def settle(self) -> None:
        self._group.settle(int(self.step[0]))

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        return self._group.array(f"{self._name} {name}", *shape, dtype=dtype)

    def floats(self, name: str, *shape: int) -> Tensor:
        return self._group.floats(f"{self._name} {name}", *shape)


class _Slot:
    """What a stage computes a batch with.

    Attributes:
        inputs: the inputs of the batch's step.
        tables: (groups, rows, blocks) int32, the block ids of the batch's requests.
        step: (1,) int64, the number of the step.
        embeds: [max_tokens, hidden] float32, the embeddings that prompts have given.
        hidden: [max_tokens, hidden] float32, what the last stage returns.
        logits: [max_samples, vocab] float32.
        kernels: this stage's part of a step.
        ending: waits for the last stage, in the first one.
    """

    def __init__(
        self,
        name: str,
        model: DecoderModel,
        cache: CpuKVCache,
        tables: StepTables,
        buffers: CpuBuffers,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
        group: Group,
        max_tokens: int,
    ) -> None:
        memory, config = _SlotMemory(group, name), model.config
        max_requests, max_samples = tables.block_tables.shape[1], tables.max_samples
        divisions = {Division.of(each) for each in config.all_attentions}
        aheads = {each.ahead for each in config.attentions}
        self.inputs = CpuInputs(
            max_tokens, max_requests, divisions, cache.num_groups, max_samples, memory, aheads,
            count_axes(config.ropes), {rate for _, rate in entry_ropes(config)},
        )  # fmt: skip
        self.tables: IntArray
        self.tables = memory.array("tables", *tables.block_tables.shape, dtype="int32")
        self.step = memory.step
        self.logits = memory.floats("logits", max_samples, config.vocab_size)
        self.hidden = memory.floats("hidden", max_tokens, config.hidden_size)
        width = config.connected_width or config.hidden_size
        streams = [
            memory.floats(f"stream {stage}", max_tokens, width) for stage in range(group.num_stages)
        ]
        self.embeds = own = streams[group.rank]
        self.kernels = KernelProgram(num_threads)
        link = Link(self.kernels, name, group, self.step)
        buffers = copy(buffers)
        if config.connected_width:  # each layer makes its `hidden` of these
            buffers.connected = own
            self.embeds = memory.floats("embeds", max_tokens, config.hidden_size)
        else:
            buffers.hidden = own
        buffers.embeds = self.embeds
        products = Products(self.kernels, buffers.rounded, activation_dtype, uses_tiles)
        num_tokens = self.inputs.address_of("num_tokens")
        num_samples = self.inputs.address_of("num_samples")
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self.kernels, products, config, buffers, self.inputs, cache, self.tables,
            receive=lambda: link.take(num_tokens, streams[group.rank - 1], own),
        )  # fmt: skip
        found = model.forward(self._ops)
        if config.stage.is_last:
            rows = buffers.sampled
            self._every = np.arange(max_tokens)
            record_gather(self.kernels, num_tokens, self._every, found, self.hidden)
            record_gather(self.kernels, num_samples, self.inputs.sample_tokens, found, rows)
            if config.lm_head:
                model.logits(CpuLogitsOps(self.kernels, products, num_samples, self.logits), rows)
        link.publish()
        self.ending = KernelProgram(1)
        Link(self.ending, name, group, self.step).wait_for_last()

    def fill_tables(self, tables: IntArray, inputs: StepInputs, block_size: int) -> None:
        """Copy the blocks of the batch's requests."""
        rows, most = inputs.rows, -(-int(inputs.context_lens.max()) // block_size)
        self.tables[:, rows, :most] = tables[:, rows, :most]


class CpuPipeline:
    """The programs of a stage. Rank 0, the first stage, begins the steps of all.

    Args:
        model: the stage's part of the model; the addresses of its weights must not change.
        cache: the KV cache.
        batch: the block tables of all requests.
        block_size: tokens in a block.
        max_tokens: the largest number of tokens in a step.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX, but for experts.
        group: the group of the stages.

    Attributes:
        num_slots: how many batches are under way at once.

    Its other attributes are those of `make_program.Program`.
    """

    deterministic = True

    def __init__(
        self,
        model: DecoderModel,
        cache: CpuKVCache,
        batch: StepTables,
        block_size: int,
        max_tokens: int,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
        group: Group,
    ) -> None:
        self.observe: Observe | None = None
        self._group = group
        self._batch = batch
        self._block_size = block_size
        self.num_slots = group.num_stages
        self.buffers = CpuBuffers(
            model.config, max_tokens, batch.max_samples, activation_dtype,
            block_size=cache.block_size,
        )  # fmt: skip
        self._slots = [
            _Slot(
                f"batch {number}", model, cache, batch, self.buffers, num_threads,
                activation_dtype, uses_tiles, group, max_tokens,
            )
            for number in range(self.num_slots)
        ]  # fmt: skip
        self._next = 0
        self._num_scored = group.array("number of scored rows", 1)
        self._scored = group.floats("scored", SCORED_ROWS, model.config.hidden_size)
        self._scored_logits = group.floats("scored logits", SCORED_ROWS, model.config.vocab_size)
        self._scoring_step = group.array("scoring step", 1)
        self._scoring = KernelProgram(num_threads)
        link = Link(self._scoring, "scoring", group, self._scoring_step)
        if model.config.stage.is_last and model.config.lm_head:
            products = Products(self._scoring, self.buffers.rounded, activation_dtype, uses_tiles)
            num_scored = int(self._num_scored.ctypes.data)
            ops = CpuLogitsOps(self._scoring, products, num_scored, self._scored_logits)
            model.logits(ops, self._scored)
            link.publish()
        elif group.rank == 0:
            link.wait_for_last()

    @property
    def inputs(self) -> CpuInputs:
        """The inputs of the next step that begins."""
        return self._slots[self._next].inputs

    @property
    def embeds(self) -> Tensor:
        """Where embeddings that prompts give are written before the next step."""
        return self._slots[self._next].embeds

    @property
    def routed(self) -> Tensor | None:
        """See `make_program.Program`. The options refuse to return experts."""
        return None

    @property
    def levels(self) -> Tensor | None:
        """Where what images add behind the first layers is written before the next step."""
        return self.buffers.levels

    def start(self, inputs: StepInputs) -> int:
        """Compute the first stage of the step whose inputs are in `self.inputs`, and let the others
        begin.

        Returns:
            The step's slot. It is free again after `finish`.
        """
        number, slot = self._next, self._slots[self._next]
        self._next = (number + 1) % self.num_slots
        slot.fill_tables(self._batch.block_tables, inputs, self._block_size)
        slot.step[0] = self._group.step[0] + 1
        slot.kernels.replay(observe=self.observe)
        self._group.begin(Kind.STEP, number)
        return number

    def finish(self, number: int, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Wait for the last stage of a step; returns what `Program.run` does."""
        slot = self._slots[number]
        slot.ending.replay()
        self._group.check()
        return slot.hidden[: len(inputs.token_ids)], slot.logits[: len(inputs.sample_tokens)]

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See `Program.run`."""
        return self.finish(self.start(inputs), inputs)

    def play(self, kind: Kind, slot: int) -> None:
        """Compute this stage's part of a step that the first stage has begun."""
        kernels = self._scoring if kind is Kind.SCORING else self._slots[slot].kernels
        kernels.replay(observe=self.observe)

    def inputs_of(self, slot: int) -> CpuInputs:
        """Return the inputs of a slot's step."""
        return self._slots[slot].inputs

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Program.compute_logits`: the last stage computes them."""
        logits = hidden.new_empty(len(hidden), self._scored_logits.shape[1])
        for begin in range(0, len(hidden), SCORED_ROWS):
            rows = hidden[begin : begin + SCORED_ROWS]
            self._group.settle(int(self._scoring_step[0]))
            self._scored[: len(rows)] = rows
            self._num_scored[0] = len(rows)
            self._scoring_step[0] = self._group.step[0] + 1
            self._group.begin(Kind.SCORING)
            self._scoring.replay()
            self._group.check()
            logits[begin : begin + len(rows)] = self._scored_logits[: len(rows)]
        return logits
