"""Executes step plans on a GPU.

Submitting a step only launches its work: copies, kernels and graphs go to the device's one stream,
and the host waits for an event when it needs the step's result. Work that needs the tokens of the
step before on the host, for example a grammar's mask, is launched in `release`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.core.plan import StepPlan, StepResult
from shmllm.worker.batch import StepInputs
from shmllm.worker.draft_loading import ReloadedArena, load_draft
from shmllm.worker.gpu.cache import GpuKVCache, cache_bytes
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import GraphDispatcher
from shmllm.worker.gpu.inputs import MAX_STEPS_IN_FLIGHT
from shmllm.worker.gpu.memory import DeviceMemory, estimate_graph_bytes
from shmllm.worker.gpu.program import auto_dtype, check_model
from shmllm.worker.gpu.sampler import PendingSamplerOutput
from shmllm.worker.gpu.scorer import PendingScores, PromptScorer
from shmllm.worker.gpu.step_resources import StepResources
from shmllm.worker.gpu.transfers import PendingArrays
from shmllm.worker.load_processors import ProcessorClasses, make_processors
from shmllm.worker.loaded_runner import LoadedRunner, Observe
from shmllm.worker.loading import Progress, load_model, make_info
from shmllm.worker.memory_owners import MemoryOwners
from shmllm.worker.step_drafter import StepDrafter
from shmllm.worker.verification import accept

NOT_DETERMINISTIC = (
    "on a GPU deterministic=True fixes how attention splits contexts, but not which kernel "
    "multiplies matrices: the bits of a result may depend on the number of tokens in a step"
)


class StepTimer:
    """Measures the device's time for a step. It can be reused after `wait_ns`.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        self._begun, self._ended = device.event(timing=True), device.event(timing=True)

    def begin(self) -> None:
        """Record the start: the step's work is launched after this call."""
        self._begun.record()

    def end(self) -> None:
        """Record the end: all of the step's work has been launched."""
        self._ended.record()

    def wait_ns(self) -> int:
        """Wait for the end, and return the device's time since the start, in ns. This includes
        gaps in which the device waited for a launch."""
        self._ended.wait()
        return round(self._ended.elapsed_ms(self._begun) * 1e6)


class GpuStep:
    """A step whose forward pass was launched. Its sampling was launched as well, unless that needs
    the tokens of the step before.

    Args:
        runner: the runner that launched the step.
        timer: the step's timer, which has begun.
        plan: the step's plan.
        inputs: the step's inputs.
        hidden: [T or more, hidden] on the device, the hidden states of all tokens.
        logits: (N or more, V) on the device, the logits of the step's N samples.
        prompt_scores: the pending log-probabilities of prompts.
        pooled: the pending hidden states of all tokens, (T * hidden,) float32; None if the step
            has no pooling requests.
    """

    def __init__(
        self,
        runner: GpuRunner,
        timer: StepTimer,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor,
        prompt_scores: list[PendingScores],
        pooled: PendingArrays | None,
    ) -> None:
        self._runner = runner
        self._timer = timer
        self._plan = plan
        self._inputs = inputs
        self._hidden = hidden
        self._logits = logits
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        self._expected = runner.batch.expect(inputs)
        self._sampled: PendingSamplerOutput | None = None
        if not plan.samples:
            timer.end()
        elif not runner.sampler.needs_tokens(plan, inputs):
            self._sample()

    def release(self) -> None:
        """Launch the sampling if it waits: the batch and the constraints have the tokens of the
        step before."""
        if self._plan.samples and self._sampled is None:
            self._sample()

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the step, and store its tokens in the batch."""
        device_ns = self._timer.wait_ns()
        scores = [pending.result() for pending in self._prompt_scores]
        result, vectors = StepResult([]), self._pool()
        if self._sampled is not None:
            sampled = self._sampled.result()
            self._runner.batch.fill(self._expected, sampled.token_ids)
            result = accept(self._plan, sampled)
            if result.counts is not None:
                rows = np.array(self._plan.rows, np.int32)[self._plan.samples]
                tokens = np.array(result.token_ids, np.int64)
                self._runner.sampler.count_accepted(np.repeat(rows, result.counts), tokens)
        self._runner.follow(self._plan, self._inputs, self._hidden, result.counts)
        result.prompt_logprobs, result.vectors, result.device_ns = scores, vectors, device_ns
        return result

    def _pool(self) -> list[bytes]:
        if self._pooled is None:
            return []
        (states,) = self._pooled.arrays()
        hidden = torch.from_numpy(states).view(len(self._inputs.token_ids), -1)
        return self._runner.pooler(hidden, self._inputs, self._plan)

    @torch.inference_mode()
    def _sample(self) -> None:
        runner = self._runner
        masks = runner.masks.begin(self._plan.constraints, self._plan.drafts)
        self._sampled = runner.sampler(self._logits, self._inputs, runner.inputs, self._plan, masks)
        self._timer.end()


class GpuRunner(LoadedRunner):
    """A loaded model with its KV cache on a GPU.

    Args:
        config: the engine's configuration.
        device: the GPU.
        on_load: called with (bytes read, bytes in all) while weights are read.
        on_capture: called with (sizes captured, sizes in all) while graphs are captured.

    Attributes:
        device: as given.
        batch: the state of the running requests, on the host.
        inputs: the inputs of the current step, on the device.
        sampler: the sampler.

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
    ) -> None:
        began = time.monotonic()
        self.device = device
        is_drafting = config.speculative.most_drafted > 0
        overlaps = config.scheduler.async_scheduling is not False and not is_drafting
        self.max_in_flight = 2 if overlaps else 1
        memory = DeviceMemory(device)
        loaded = load_model(config.load, memory, auto_dtype, check_model, on_load)
        super().__init__(config, loaded, loaded.config.embeds_scale)
        self._dispatcher = _make_dispatcher(config)
        draft = load_draft(config, loaded, memory, auto_dtype, check_model)
        resources = StepResources.allocate(config, loaded, draft, device)
        drafts = resources.drafts
        self.batch, self.inputs, self.sampler = resources.batch, resources.inputs, resources.sampler
        self._buffers = resources.buffers
        self._adapters = self._lora = resources.lora
        shape = resources.shape
        num_captured = len(self._dispatcher.captures()) * loaded.config.num_layers
        self.kv_groups = shape.groups
        size = memory.size_cache(
            config.cache,
            shape,
            loaded.max_model_len,
            sum(each.weights.resident_bytes for each in (loaded, draft) if each is not None),
            estimate_graph_bytes(num_captured + (0 if drafts is None else drafts.num_captured)),
            resources.run_largest,
        )
        num_bytes = cache_bytes(shape, loaded.dtype, size.num_blocks, size.num_states)
        kv_cache = memory.make_arena(num_bytes, "the KV cache")
        self._cache = cache = GpuKVCache(
            loaded.config, loaded.dtype, shape, size.num_blocks, kv_cache, size.num_states
        )
        self._program = resources.make_program(cache, self._dispatcher)
        with torch.inference_mode():
            captured = self._program.capture(on_capture)
            self.sampler.warm_up(self._buffers.logits)
            self._drafter: StepDrafter | None = None
            if drafts is not None:
                launches = DraftLaunches(self.batch, self.inputs, self.sampler, device)
                self._drafter, further = drafts.make_drafter(cache, self.batch, launches)
                captured += further
        self._timers = deque(StepTimer(device) for _ in range(MAX_STEPS_IN_FLIGHT))
        self._score_prompt = PromptScorer(
            self.batch, self.sampler.scorer, self.sampler.transfers, self._program.compute_logits
        )
        self.memory = MemoryOwners(
            self.model,
            loaded.weights,
            kv_cache,
            (self.pooler, self.masks),
            memory,
            (self._buffers.arena, *(() if drafts is None else drafts.buffers)),
            captured.num_bytes,
            () if draft is None else (ReloadedArena(draft),),
        )
        self.info = make_info(
            config,
            loaded,
            size,
            shape,
            num_threads=1,
            load_seconds=time.monotonic() - began,
            deterministic=False,
            activation_dtype=loaded.dtype_name,
            kv_cache_dtype=loaded.dtype_name,
            device=device.name,
            device_uuid=device.uuid,
            async_scheduling=overlaps,
            graphs=f"{self._dispatcher.mode.name}: {captured}" if captured.num_graphs else "",
            warnings=(NOT_DETERMINISTIC,) if config.load.deterministic else (),
        )

    def use_processors(self, classes: ProcessorClasses) -> None:
        made = make_processors(classes, self.info, self.device.torch_device, self.batch.token_ids)
        self.processors = self.sampler.processors = made

    def observe(self, observe: Observe | None) -> None:
        """Do nothing: torch's profiler records a GPU's kernels by itself."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> GpuStep:
        """Launch the step of a plan, behind the steps that were submitted before."""
        self._timers.rotate()
        timer = self._timers[0]
        timer.begin()
        self.batch.update(plan)
        for source, target in plan.state_copies:
            self._cache.copy_state(source, target)
        self.sampler.update(plan)
        self.inputs.update(plan)
        if self._drafter is not None:
            self._drafter.draft(plan)
        inputs = self.batch.inputs(plan)
        self._prompt_embeds.update(plan)
        self._prompt_embeds.copy_into(self._buffers.hidden, inputs.token_ids, inputs)
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        is_decode = num_tokens == num_requests
        mode, descriptor = self._dispatcher.dispatch(
            num_tokens, num_requests, is_decode, plan.num_drafts
        )
        self.inputs.send(inputs, descriptor, plan.is_repeat)
        if self._lora is not None and not plan.is_repeat:
            self._lora.send([request.adapter for request in plan.requests], inputs.counts)
        max_query_len = 1 if is_decode else int(inputs.counts.max())
        hidden, logits = self._program.run(mode, descriptor, max_query_len)
        scores = [self._score_prompt(hidden, inputs, wanted) for wanted in plan.prompt_scores]
        states = None
        if plan.pools:
            states = self.sampler.transfers.fetch(hidden[:num_tokens].float())
        return GpuStep(self, timer, plan, inputs, hidden, logits, scores, states)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """Let the model that drafts see a step, if there is one; see `StepDrafter.follow`."""
        if self._drafter is not None:
            self._drafter.follow(plan, inputs, hidden, counts)


def _make_dispatcher(config: EngineConfig) -> GraphDispatcher:
    graphs, scheduler = config.graphs, config.scheduler
    is_ours = config.load.model_impl != "transformers"
    return GraphDispatcher(
        graphs.effective_mode if is_ours else CudaGraphMode.NONE,
        graphs.capture_sizes,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        graphs.max_capture_size,
        config.max_drafts,
    )
