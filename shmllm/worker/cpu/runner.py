"""Executes step plans on a CPU.

A submitted step runs when its result is asked for, or, if steps overlap, on a thread. The thread
runs one step after another, so that each step finds the state that the step before left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import PromptScores, StepPlan, StepResult
from shmllm.models.entries import stored_kv
from shmllm.outputs.columns import Piece
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.plugins.kv_connector import KVConnector
from shmllm.worker.background import BackgroundThread
from shmllm.worker.batch import EMBEDDED, InputBatch
from shmllm.worker.cpu.draft_model import make_draft_model
from shmllm.worker.cpu.group_shared_cache import GroupSharedCache
from shmllm.worker.cpu.make_program import describe_products, make_head
from shmllm.worker.cpu.multi_token_prediction import CpuFurtherSteps
from shmllm.worker.cpu.part import CpuPart
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.draft_loading import ReloadedArena
from shmllm.worker.grammar_masks import PendingMasks
from shmllm.worker.items import spread_levels
from shmllm.worker.kv_connector import WorkerConnector
from shmllm.worker.load_processors import ProcessorClasses, make_processors
from shmllm.worker.loaded_runner import LoadedRunner, Observe
from shmllm.worker.loading import Progress, make_info
from shmllm.worker.memory import smallest
from shmllm.worker.memory_owners import MemoryOwners, Workspace
from shmllm.worker.multi_token_prediction import MultiTokenPrediction
from shmllm.worker.ranks import NoRanks, Ranks
from shmllm.worker.routed_experts import make_routed_experts
from shmllm.worker.scoring import score_in_pieces
from shmllm.worker.step_drafter import StepDrafter
from shmllm.worker.step_inputs import StepInputs
from shmllm.worker.verification import accept
from shmllm_kernels.cpu.version import version

NOT_DETERMINISTIC = (
    "deterministic=True has no effect with model_impl='transformers': the bits of a result may "
    "depend on the number of tokens in a step"
)
TABLES = "block tables"
"""The name of the block tables in the memory of a group."""
Execute = Callable[[StepPlan], StepResult]


class DeferredStep:
    """A submitted step that runs in `result`."""

    def __init__(self, execute: Execute, plan: StepPlan) -> None:
        self._execute = execute
        self._plan = plan

    def release(self) -> None:
        """Do nothing: the step has not begun."""

    def result(self) -> StepResult:
        """Run the step."""
        return self._execute(self._plan)


class ThreadedStep:
    """A submitted step that runs on a thread. If it has constraints, it waits for `release`: the
    engine's thread gives them the tokens of the step before.

    Args:
        execute: computes a plan.
        plan: the step's plan.
        thread: runs the step, after the steps that were submitted before.
    """

    def __init__(self, execute: Execute, plan: StepPlan, thread: BackgroundThread) -> None:
        self._released: threading.Event | None = threading.Event() if plan.constraints else None
        self._execute = execute
        self._plan = plan
        self._future: Future[StepResult] = thread.submit(self._run)

    def release(self) -> None:
        """Let the step begin: its constraints have the tokens of the step before."""
        if self._released is not None:
            self._released.set()

    def result(self) -> StepResult:
        """Wait for the step."""
        return self._future.result()

    def _run(self) -> StepResult:
        if self._released is not None:
            self._released.wait()
        # The step ran beside the engine's thread, so its times are not part of that thread's.
        return replace(self._execute(self._plan), computing_ns=None)


class CpuRunner(LoadedRunner):
    """A loaded model with its KV cache on a CPU. Steps overlap if they run on a thread.

    If other ranks compute parts of the model, they do what this runner does: see `Ranks`.

    Args:
        config: the engine's configuration.
        on_progress: called with (bytes read, bytes in all) while weights are read.
        warnings: warnings for the engine's info.
        ranks: the other ranks; None: this process computes the whole model.

    Raises:
        EngineStartError: the model cannot be loaded, or it does not fit into the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Progress | None = None,
        warnings: Sequence[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        began = time.monotonic()
        if ranks is None:
            ranks = NoRanks(config.num_threads or len(os.sched_getaffinity(0)))
        self._part = part = CpuPart(config, ranks.memory, ranks.num_threads, on_progress)
        loaded = part.loaded
        super().__init__(config, loaded, ranks, head=make_head(loaded.model, ranks.num_threads))
        part.set_tower_products()
        self.kv_groups = part.shape.groups
        size = smallest(ranks.together(part.size_cache, "size_cache"))
        self._vocab_size = loaded.config.vocab_size
        self._batch = InputBatch(
            config.num_rows,
            size.max_model_len,
            config.cache.block_size,
            self._vocab_size,
            len(part.shape.groups),
            max_drafts=config.max_drafts,
            patches_per_side=loaded.config.patches_per_side,
            grid_axes=loaded.config.vision.grid_axes if loaded.config.vision else 0,
            canvas=loaded.config.vision.canvas if loaded.config.vision else None,
            video_times=loaded.config.video_times,
            spans_prompts=loaded.config.spans_prompts,
            has_encoder=loaded.config.num_encoded > 0,
            make_tables=lambda shape: ranks.memory.array(TABLES, *shape, dtype="int32"),
        )
        self._routed = make_routed_experts(
            loaded.config, self.kv_groups, size.num_blocks, self._batch
        )

        part.build(size, self._batch)  # first: the others get the arrays that this one makes
        weight_bytes = sum(ranks.everywhere(lambda: loaded.weights.num_bytes, "build", size))
        self._shared = None if part.shared is None else GroupSharedCache(part.shared, ranks)
        self.shared_cache = self._shared
        self._connector: WorkerConnector | None = None
        self._lora = part.lora
        self._adapters = None if part.lora is None else ranks.adapters(part.lora)
        self._program = part.program
        self._sampler = CpuSampler(
            self._batch, config.logprobs.mode, returns_masks=config.logprobs.returns_masks
        )
        workspaces: list[Workspace] = [
            self._program.buffers,
            ranks.memory,
            self.pooler,
            self.masks,
            self.items,
        ]
        if self._routed is not None:
            workspaces.append(self._routed)
        self._drafter = self._make_drafter(config, workspaces)
        is_drafting = config.speculative.most_drafted > 0
        overlaps = bool(config.scheduler.async_scheduling) and not is_drafting
        self.max_in_flight = 2 if overlaps else 1
        self._thread = BackgroundThread("shmllm-steps") if overlaps else None
        further = [] if part.draft is None else [ReloadedArena(part.draft)]
        own = MemoryOwners(
            self.model, loaded.weights, part.kv_cache, workspaces, part.pool, further=further
        )
        self.memory = ranks.owners(own)
        self._scores_probabilities = config.logprobs.mode.endswith("logprobs")
        activations, instructions = describe_products(loaded)
        self.info = make_info(
            config,
            loaded,
            size,
            part.shape,
            num_threads=ranks.num_threads * ranks.memory.size,
            load_seconds=time.monotonic() - began,
            deterministic=self._program.deterministic,
            activation_dtype=activations,
            kv_cache_dtype=part.kv_cache_dtype,
            instructions=instructions,
            num_ranks=ranks.memory.shard.size,
            num_stages=ranks.memory.num_stages,
            weight_bytes=weight_bytes,
            async_scheduling=overlaps,
            warnings=[*warnings, *self._not_deterministic(config)],
        )

    def _make_drafter(
        self, config: EngineConfig, workspaces: list[Workspace]
    ) -> StepDrafter | None:
        """Make what drafts inside steps, if anything does; add its buffers to the workspaces."""
        part, loaded, num_threads = self._part, self._part.loaded, self._ranks.num_threads
        drafter: StepDrafter | None = None
        if part.draft is not None:
            first, common = len(stored_kv(loaded.config)), (self._batch, self._sampler, num_threads)
            drafter, buffers = make_draft_model(
                config, part.draft, part.cache, first, *common, part.program
            )
            workspaces += [] if buffers is None else [buffers]
        elif part.further is not None:
            further = CpuFurtherSteps(part.further, self._batch, self._sampler)
            drafter = MultiTokenPrediction(further, self._batch)
        return drafter

    def _not_deterministic(self, config: EngineConfig) -> list[str]:
        if config.load.deterministic and not self._program.deterministic:
            return [NOT_DETERMINISTIC]
        return []

    def numerics(self) -> dict[str, Any]:
        return super().numerics() | {"kernels": version(), "cache": self._part.stored}

    @property
    def block_parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        shape = self._part.shape
        states = (len(shape.state_layers), shape.state_bytes if shape.state_layers else 0)
        blocks = (shape.num_buffers, shape.buffer_bytes if shape.num_buffers else 0)
        size = self._ranks.memory.shard.size
        return (size * blocks[0], blocks[1]), (size * states[0], states[1])

    def use_processors(self, classes: ProcessorClasses) -> None:
        device = torch.device("cpu")
        made = make_processors(classes, self.info, device, self._batch.token_ids)
        self.processors = self._sampler.processors = made

    def use_connector(self, connector: KVConnector, name: str) -> None:
        self._connector = WorkerConnector(connector, name, self._part.layers_by_name())

    def observe(self, observe: Observe | None) -> None:
        """See `LoadedRunner.observe`. The other ranks run their kernels one by one, too."""

        def own() -> None:
            self._program.observe = observe

        self._ranks.everywhere(own, "observe", observe is not None)

    def submit(self, plan: StepPlan) -> DeferredStep | ThreadedStep:
        """Start a step on the thread if steps overlap; else the step runs in its `result`. While
        kernels are observed all steps run in `result`, and each has to be called before the next
        plan is submitted."""
        if self._thread is None or self._program.observe is not None:
            return DeferredStep(self.execute, plan)
        return ThreadedStep(self.execute, plan, self._thread)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, and sample the tokens that it asks for."""
        shared = self._shared
        if shared is not None:
            self._ranks.memory.label = plan.step + 1
            shared.copy(plan.saves_before, plan.loads)
            if not plan.num_tokens:
                return StepResult([])
            result = self._execute(plan)
            shared.copy(plan.saves_after)
            return result
        if self._connector is not None:
            return self._connector.run(plan, self._execute)
        return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        inputs = self.prepare(plan)
        masks = self.masks.begin(plan.constraints, plan.drafts)
        prepared_ns = time.perf_counter_ns()
        hidden, logits = self._program.run(inputs)
        return self.complete(plan, inputs, masks, hidden, logits, prepared_ns)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Write the inputs of a plan's step to where the program reads them."""
        self._ranks.memory.label = plan.step + 1
        self._batch.update(plan)
        if self._drafter is not None:
            self._drafter.draft(plan)
        if self.processors is not None:
            self.processors.update(plan)
        inputs = self._batch.inputs(plan)
        program_inputs = self._program.inputs
        program_inputs.fill(inputs)
        if self._lora is not None and not plan.is_repeat:
            self._lora.fill([request.adapter for request in plan.requests], inputs.counts)
            self._drop_adapters()
        program_inputs.state_copies = plan.state_copies
        self._part.copy_states(program_inputs)
        self._prompt_embeds.update(plan)
        self._prompt_embeds.copy_into(self._program.embeds, program_inputs.token_ids, inputs)
        self._copy_items(plan, inputs)
        return inputs

    def _copy_items(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Compute the embeddings of images, and write them to where the program reads them."""
        self.items.update(plan)
        self.items.write_prefixes(plan, self._batch, self._part.prefixes)
        program_inputs, levels = self._program.inputs, self._program.levels
        inputs.item_results = self.items.results(plan)
        found = self.items.find(plan, inputs)
        hidden = self._program.embeds.shape[1]
        for tokens, rows in found:
            program_inputs.token_ids[tokens] = EMBEDDED
            self._program.embeds[tokens] = rows[:, :hidden]
        if levels is not None:
            num_tokens = len(inputs.token_ids) if found else 0
            program_inputs.num_level_tokens = num_tokens
            spread_levels(levels, found, num_tokens)

    def complete(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        masks: PendingMasks | None,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        prepared_ns: int | None,
    ) -> StepResult:
        """Sample the tokens that a plan asks for.

        Args:
            plan: the plan.
            inputs: what `prepare` returned.
            masks: what `GrammarMasks.begin` returned.
            hidden, logits: what the program returned; see `Program.run`.
            prepared_ns: when computing began; None: it is not known.
        """
        self._ranks.memory.label = plan.step + 1
        prompt_logprobs = [self._score_prompt(hidden, inputs, s) for s in plan.prompt_scores]
        vectors = self.pooler(hidden, inputs, plan) if plan.pools else ()
        computing_ns = None if prepared_ns is None else (prepared_ns, time.perf_counter_ns())
        if not plan.samples:
            self._report_experts(plan, inputs, None)
            self._follow(plan, inputs, hidden, None)
            return StepResult([], None, prompt_logprobs, vectors, computing_ns=computing_ns)
        logits = self.model.compute_logits(logits)
        sampled = self._sampler(logits, inputs.sample_rows, inputs.sample_positions, masks)
        self._batch.append(inputs, sampled.token_ids)
        result = accept(plan, sampled)
        result.prompt_logprobs, result.vectors = prompt_logprobs, vectors
        result.routed_experts = self._report_experts(plan, inputs, result.counts)
        result.computing_ns = computing_ns
        self._follow(plan, inputs, hidden, result.counts)
        return result

    def _report_experts(
        self, plan: StepPlan, inputs: StepInputs, counts: list[int] | None
    ) -> list[Piece]:
        """Remember the experts of a step's tokens, and return what is to be reported of them."""
        kept = self._program.routed
        if self._routed is None or kept is None:
            return []
        expected = self._routed.expect(plan, inputs)
        return self._routed.add(expected, kept[: len(inputs.token_ids)].numpy(), counts)

    def _follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, counts: list[int] | None
    ) -> None:
        if self._drafter is not None:
            self._drafter.follow(plan, inputs, hidden, counts)

    def _score_prompt(
        self, hidden: torch.Tensor, inputs: StepInputs, scores: PromptScores
    ) -> TokenLogprobs:
        """Score tokens of a prompt, each by the logits of the token before it."""
        first_token = int(inputs.first_tokens[scores.index])
        start = int(inputs.positions[first_token])
        begin = first_token + scores.first - 1 - start
        row = inputs.rows[scores.index]
        wanted = self._batch.token_ids[row, scores.first : scores.end].astype(np.int64)
        return score_in_pieces(
            len(wanted),
            self._vocab_size,
            lambda a, b: self._program.compute_logits(hidden[begin + a : begin + b]),
            torch.from_numpy(wanted),
            scores.k,
            self._scores_probabilities,
            scores.token_ids,
        )
