"""Executes step plans on a GPU.

Submitting a step only launches its work: copies, kernels and graphs go to the device's one stream,
and the host waits for an event when it needs the step's result. Work that needs the tokens of the
step before on the host, for example a grammar's mask, is launched in `release`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import StepPlan
from shmllm.worker.batch import EMBEDDED
from shmllm.worker.draft_loading import ReloadedArena
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.group import DeviceGroup
from shmllm.worker.gpu.heads import make_head
from shmllm.worker.gpu.inputs import MAX_STEPS_IN_FLIGHT
from shmllm.worker.gpu.kv_dtype import kv_dtype_name
from shmllm.worker.gpu.lora import GpuAdapter
from shmllm.worker.gpu.part import GpuPart
from shmllm.worker.gpu.scorer import PromptScorer
from shmllm.worker.gpu.step_messages import StepMessage, StepMessages, numbers_of, slot_of_rows
from shmllm.worker.gpu.step_timer import StepTimer
from shmllm.worker.gpu.submitted_steps import CopyingStep, GpuStep, PendingExperts
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.group import Kind
from shmllm.worker.items import spread_levels
from shmllm.worker.load_processors import ProcessorClasses, make_processors
from shmllm.worker.loaded_runner import LoadedRunner, Observe
from shmllm.worker.loading import Progress, make_info
from shmllm.worker.memory import smallest
from shmllm.worker.memory_owners import MemoryOwners
from shmllm.worker.prompt_embeds import FoundEmbeds
from shmllm.worker.ranks import NoRanks, Ranks
from shmllm.worker.routed_experts import make_routed_experts
from shmllm.worker.step_drafter import StepDrafter
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.gpu.version import version


class GpuRunner(LoadedRunner):
    """A loaded model with its KV cache on a GPU.

    Args:
        config: the engine's configuration.
        device: the GPU.
        on_load: called with (bytes read, bytes in all) while weights are read.
        on_capture: called with (sizes captured, sizes in all) while graphs are captured.
        ranks: the other ranks; None: this process computes the whole model.
        group: the memory of the group, if there are other ranks.

    Attributes:
        device: as given.
        batch: the state of the running requests, on the host.
        inputs: the inputs of the current step, on the device.
        sampler: the sampler.
        routed: remembers the experts of tokens; None: nobody asks for them.

    Raises:
        EngineStartError: the model cannot be loaded, does not fit into the memory, or has no
            kernels for a GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        on_load: Progress | None = None,
        on_capture: Progress | None = None,
        ranks: Ranks | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        began = time.monotonic()
        self.device = device
        ranks = ranks or NoRanks(num_threads=1)
        is_drafting = config.speculative.most_drafted > 0
        overlaps = config.scheduler.async_scheduling is not False and not is_drafting
        self.max_in_flight = 2 if overlaps else 1
        self._part = part = GpuPart(config, device, group, on_load)
        loaded, draft = part.loaded, part.draft
        self._item_scale = scale = loaded.config.embeds_scale
        head = make_head(loaded.model, device)
        super().__init__(config, loaded, ranks, scale, head, Transfers(device).send_one)
        size = smallest(ranks.together(part.size_cache, "size_cache"))
        resources, drafts = part.resources, part.resources.drafts
        self.batch, self.inputs, self.sampler = resources.batch, resources.inputs, resources.sampler
        self._buffers = resources.buffers
        self._lora = resources.lora
        self._adapters = None if self._lora is None else ranks.adapters(self._lora)
        self.kv_groups = resources.shape.groups
        self.routed = make_routed_experts(
            loaded.config, self.kv_groups, size.num_blocks, self.batch
        )
        self._is_deterministic = config.load.deterministic
        self._messages = None if group is None else StepMessages(group, self.inputs)

        def build() -> int:
            part.build(size, on_capture)
            return loaded.weights.num_bytes

        weight_bytes = ranks.together(build, "build", size)
        self.shared_cache = part.shared
        self._program, captured = part.program, part.captured
        with torch.inference_mode():
            if loaded.config.lm_head:
                sampled, logits = part.dispatcher.sampled_captures(), self._buffers.logits
                captured += self.sampler.capture(device, sampled, logits, self.inputs)
        self._drafter: StepDrafter | None = None
        if drafts is not None and part.drafting is not None:
            shared = self.batch, self.inputs, self.sampler
            is_divided = self._messages is not None and draft is None
            tell = self._tell if is_divided else None  # rank 0 has the whole of a draft model
            launches = DraftLaunches(*shared, drafts.dispatcher, device, tell)
            self._drafter = part.drafting.make_drafter(self.batch, launches)
        self._num_level_tokens = self._buffers.levels.shape[1]
        self._timers = deque(StepTimer(device) for _ in range(MAX_STEPS_IN_FLIGHT))
        self._score_prompt = PromptScorer(
            self.batch, self.sampler.scorer, self.sampler.transfers, self._compute_logits
        )
        own = MemoryOwners(
            self.model,
            loaded.weights,
            part.kv_cache,
            (self.pooler, self.masks, self.items, *(() if self.routed is None else (self.routed,))),
            part.pool,
            (
                self._buffers.arena,
                *(() if drafts is None else drafts.buffers),
                *(() if part.staging is None else (part.staging,)),
            ),
            captured.num_bytes,
            () if draft is None else (ReloadedArena(draft),),
        )
        self.memory = ranks.owners(own)
        self.info = make_info(
            config,
            loaded,
            size,
            resources.shape,
            num_threads=1,
            load_seconds=time.monotonic() - began,
            deterministic=False,
            activation_dtype=loaded.dtype_name,
            kv_cache_dtype=kv_dtype_name(config.load, loaded.dtype_name),
            device=device.name,
            device_uuid=device.uuid,
            num_ranks=ranks.memory.shard.size,
            weight_bytes=sum(weight_bytes),
            async_scheduling=overlaps,
            graphs=f"{part.dispatcher.mode.name}: {captured}" if captured.num_graphs else "",
            warnings=part.warnings,
        )

    def numerics(self) -> dict[str, Any]:
        own = {"kernels": version(), "deterministic": self._is_deterministic}
        return super().numerics() | own | {"device": self.device.numerics()}

    @property
    def block_parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `LoadedRunner.block_parts`: a block has one part, that of all layers."""
        shape = self._part.resources.shape
        sizes = shape.bytes_per_block, shape.bytes_per_state
        blocks, states = ((1, size) if size else (0, 0) for size in sizes)
        return blocks, states

    def use_processors(self, classes: ProcessorClasses) -> None:
        made = make_processors(classes, self.info, self.device.torch_device, self.batch.token_ids)
        self.processors = self.sampler.processors = made

    def observe(self, observe: Observe | None) -> None:
        """Do nothing: torch's profiler records a GPU's kernels by itself."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> GpuStep | CopyingStep:
        """Launch the step of a plan, behind the steps that were submitted before."""
        self._ranks.memory.label = plan.step + 1
        self._timers.rotate()
        timer = self._timers[0]
        timer.begin()
        shared = self._part.shared
        if shared is not None:
            shared.save(plan.saves_before)
            shared.load(plan.loads)
            if not plan.num_tokens:
                timer.end()
                return CopyingStep(timer)
        self.batch.update(plan)
        self._part.copy_states(plan.state_copies)
        self.sampler.update(plan)
        changes = self.inputs.changes_of(plan)
        self.inputs.change_blocks(changes)
        if self._drafter is not None:
            self._drafter.draft(plan)
        inputs = self.batch.inputs(plan)
        self._prompt_embeds.update(plan)
        embeds = self._prompt_embeds.find(inputs.token_ids, inputs)
        self.items.update(plan)
        self.items.write_prefixes(plan, self.batch, self._part.prefixes)
        inputs.item_results = self.items.results(plan)
        found = self.items.find(plan, inputs)
        for tokens, _ in found:
            inputs.token_ids[tokens] = EMBEDDED
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        is_decode = num_tokens == num_requests
        mode, descriptor = self._part.dispatcher.dispatch(
            num_tokens, num_requests, is_decode, plan.num_drafts
        )
        packed, max_query_len = (
            self.inputs.pack(inputs),
            1 if is_decode else int(inputs.counts.max()),
        )
        adapters = self._adapters_of(plan)
        if self._messages is not None:
            sizes = mode, descriptor, max_query_len
            repeats, copies, of_requests = plan.is_repeat, plan.state_copies, None
            if adapters is not None:
                of_requests = np.array([numbers_of(adapters), inputs.counts])
            told = StepMessage(*sizes, packed, repeats, changes, copies, of_requests)
            self._ranks.memory.begin(Kind.STEP, self._messages.write(told))
        # Copies may wait for the device, which waits for the other ranks: they know the step now.
        self._program.begin()
        self._prompt_embeds.copy(self._program.embeds, embeds)
        self._copy_items(found, num_tokens)
        self.inputs.launch(packed, descriptor, plan.is_repeat)
        if self._lora is not None and adapters is not None:
            self._lora.send(adapters, inputs.counts)
        hidden, logits = self._program.run(mode, descriptor, max_query_len)
        scores = [self._score_prompt(hidden, inputs, wanted) for wanted in plan.prompt_scores]
        states = None
        if plan.pools:
            results = [each.float() for each in inputs.item_results.values()]
            states = self.sampler.transfers.fetch(hidden[:num_tokens].float(), *results)
        experts = self._fetch_experts(plan, inputs)
        if shared is not None and self._drafter is None:
            shared.save(plan.saves_after)  # the timer ends later
        return GpuStep(self, timer, plan, inputs, hidden, logits, scores, states, experts)

    def _fetch_experts(self, plan: StepPlan, inputs: StepInputs) -> PendingExperts | None:
        """Launch the copy of the choices of experts to the host; None: nobody asks for them."""
        kept = self._buffers.routed
        if self.routed is None or kept is None:
            return None
        chosen = kept[: len(inputs.token_ids)].view(torch.uint8)
        fetched = self.sampler.transfers.fetch(chosen)
        return PendingExperts(self.routed.expect(plan, inputs), fetched)

    def _tell(self, step: StepMessage) -> None:
        """Let the others compute their parts of a step between two of the model's. Several of those
        may be under way, so this waits until the others have read of the one before."""
        assert self._messages is not None, "there are others"
        self._ranks.memory.settle()
        self._ranks.memory.begin(Kind.FURTHER, self._messages.write(step))

    def _adapters_of(self, plan: StepPlan) -> list[GpuAdapter | None] | None:
        """Return the adapter of each request; None: those of the step before, or there are none.
        The others free what they need no more before they are told of the step: in it they may wait
        for this process."""
        if self._lora is None or plan.is_repeat:
            return None
        self._drop_adapters()
        return [request.adapter for request in plan.requests]

    def _copy_items(self, found: list[FoundEmbeds], num_tokens: int) -> None:
        """Launch the copy of images' embeddings to where the program reads them."""
        embeds, levels = self._program.embeds, self._buffers.levels
        for tokens, rows in found:
            given = rows[:, : embeds.shape[1]]
            embeds[tokens] = given if self._item_scale == 1 else given * self._item_scale
        if len(levels) and (found or self._num_level_tokens):
            # Graphs add them in every step, so those of other tokens have to be zeros.
            spread_levels(levels, found, max(num_tokens, self._num_level_tokens))
            self._num_level_tokens = num_tokens if found else 0

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """As `Program.compute_logits`, for hidden states of the last step, on all ranks."""
        if self._messages is not None:
            first = hidden.data_ptr() - self._buffers.results.data_ptr()
            row_bytes = hidden.shape[1] * hidden.itemsize
            slot = slot_of_rows(first // row_bytes, len(hidden))
            self._ranks.memory.begin(Kind.SCORING, slot)
        self._program.begin()
        return self._program.compute_logits(hidden)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """Let the model that drafts see a step, if there is one; see `StepDrafter.follow`."""
        if self._drafter is not None:
            self._drafter.follow(plan, inputs, hidden, counts)

    def saves_late(self, plan: StepPlan) -> bool:
        """Launch the saves of a step behind what the model that drafts has written. Returns whether
        there are any."""
        shared = self._part.shared
        if shared is None or self._drafter is None or not plan.saves_after:
            return False
        shared.save(plan.saves_after)
        return True
