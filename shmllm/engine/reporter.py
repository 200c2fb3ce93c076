"""Writes the engine's state and statistics to its control page.

This module owns the counters that no other module has: the time spent on reading and writing
rings, the time to first token (TTFT) and the inter-token latency (ITL). It must not know which
programs read them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from shmllm.engine.core import EngineCore
from shmllm.engine.step_timings import StepTimings
from shmllm.ipc.control import ControlPage
from shmllm.ipc.states import EngineState
from shmllm.ipc.stats import Histogram, Mark, Stat
from shmllm.outputs.columns import OutputColumns

logger = logging.getLogger(__name__)

STATE_PERIOD_NS = 5_000_000


class Reporter:
    """
    Args:
        page: the control page.

    Attributes:
        drain_ns: the time spent reading records from request rings.
        publish_ns: the time spent writing outputs to output rings.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._ttft = page.histogram(Histogram.TTFT)
        self._itl = page.histogram(Histogram.ITL)
        self._steps = page.histogram(Histogram.STEP)
        page.mark(Mark.STARTED)
        self._log = page.step_log()
        self._last_tokens_ns = self._logged_drain_ns = 0
        self._written_ns = self._written_changes = 0
        self.drain_ns = self.publish_ns = 0

    def imported(self, model: str) -> None:
        """The runner's modules are imported; the engine loads the model of that name next."""
        self._page.set_model(model)
        self._page.mark(Mark.IMPORTED)

    def loading(self, done: int, total: int) -> None:
        """`done` of `total` bytes of the weights were read. Also updates the heartbeat."""
        self._page.set_stat(Stat.WEIGHT_BYTES_LOADED, done)
        self._page.set_stat(Stat.WEIGHT_BYTES_TOTAL, total)
        self._page.beat()

    def capturing(self, done: int, total: int) -> None:
        """`done` of `total` sizes of CUDA graphs were captured. Also updates the heartbeat."""
        self._page.set_stat(Stat.GRAPHS_CAPTURED, done)
        self._page.set_stat(Stat.GRAPHS_TOTAL, total)
        self._page.beat()

    def ready(self, core: EngineCore) -> None:
        """The engine core is loaded, and the engine accepts front ends."""
        self._page.set_stat(Stat.KV_BLOCKS_TOTAL, core.info.num_counted_blocks)
        self._page.set_device(core.info.places)
        self._page.set_precision(core.info.precision)
        self._page.set_speculation(core.info.speculation)
        self._page.set_stat(Stat.NUM_SPECULATIVE_TOKENS, core.info.num_speculative_tokens)
        self._page.set_stat(Stat.SHARED_KV_CACHE_BYTES, core.info.shared_kv_cache_bytes)
        self._page.mark(Mark.READY)
        self._page.beat()
        self._page.set_state(EngineState.READY)
        logger.info("the engine is ready on %s, pid %d", core.info.device, os.getpid())

    def stopped_rank(self, pid: int) -> None:
        """A signal has stopped this process of the engine; 0: it has been continued."""
        self._page.set_stat(Stat.STOPPED_RANK, pid)

    def parked(self, times: int) -> None:
        """The engine process has parked this many times since its start."""
        self._page.set_stat(Stat.TIMES_PARKED, times)

    def step(
        self,
        timings: StepTimings,
        stepped_ns: int,
        ended_ns: int,
        outputs: Mapping[int, OutputColumns],
    ) -> None:
        """Count and log the last step.

        Args:
            timings: the timings of the engine's steps, which include the last step's timestamps.
            stepped_ns: when the core returned the step's outputs, in `time.perf_counter_ns()`.
            ended_ns: when the outputs were published, in `time.perf_counter_ns()`.
            outputs: the columns of each front end.
        """
        began_ns, planned_ns, prepared_ns, executed_ns, sampled_ns, applied_ns = timings.moments_ns
        self.publish_ns += ended_ns - stepped_ns
        self._page.set_stat(Stat.STEP_NS, ended_ns - began_ns)
        self._steps.add(ended_ns - began_ns)
        num_sampled, num_first = self._count_tokens(ended_ns, outputs)
        self._log.add(
            (
                began_ns,
                self.drain_ns - self._logged_drain_ns,
                planned_ns - began_ns,
                prepared_ns - planned_ns,
                executed_ns - prepared_ns,
                sampled_ns - executed_ns,
                applied_ns - sampled_ns,
                ended_ns - stepped_ns,
                timings.num_tokens,
                timings.num_requests,
                num_sampled,
                num_first,
                timings.device_ns,
                timings.num_draft_tokens,
                timings.num_accepted_tokens,
            )
        )
        self._logged_drain_ns = self.drain_ns

    def _count_tokens(self, ended_ns: int, outputs: Mapping[int, OutputColumns]) -> tuple[int, int]:
        """Add the latencies of a step's tokens to the histograms. A request that got several tokens
        counts once.

        Returns:
            (the number of tokens, the number of requests that got their first token).
        """
        num_sampled = num_first = num_given = 0
        for columns in outputs.values():
            num_sampled += len(columns.token_ids)
            num_given += len(columns.counts) - columns.counts.count(0)
            num_first += len(columns.queued_ns)
            # On Linux both clocks are CLOCK_MONOTONIC.
            for queued_ns in columns.queued_ns:
                self._ttft.add(ended_ns - queued_ns)
        if num_given > num_first:
            self._itl.add(ended_ns - self._last_tokens_ns, num_given - num_first)
        if num_sampled:
            self._last_tokens_ns = ended_ns
        return num_sampled, num_first

    def write_state_if_due(self, core: EngineCore, now_ns: int) -> None:
        """Write the state after a step if requests were admitted, preempted or ended, and otherwise
        every STATE_PERIOD_NS. The step has evicted the two dozen words of the state from the
        processor's cache, so writing them takes as long as writing the step's outputs."""
        stats = core.scheduler.stats
        changes = stats.requests_finished + stats.prompt_tokens + stats.preemptions
        if changes != self._written_changes or now_ns - self._written_ns >= STATE_PERIOD_NS:
            self._written_changes, self._written_ns = changes, now_ns
            self.write_state(core)

    def write_state(self, core: EngineCore) -> None:
        """Write the current numbers of requests, blocks and tokens, and the time by phase."""
        scheduler, set_stat = core.scheduler, self._page.set_stat
        stats, timings = scheduler.stats, core.timings
        set_stat(Stat.STEPS, stats.steps)
        set_stat(Stat.RUNNING, scheduler.num_running)
        set_stat(Stat.WAITING, scheduler.num_waiting)
        set_stat(Stat.KV_BLOCKS_USED, core.num_used_blocks)
        set_stat(Stat.PAUSED, bool(core.pauses))
        set_stat(Stat.ASLEEP, core.sleeper.state)
        set_stat(Stat.PREFIX_QUERY_TOKENS, stats.prefix_query_tokens)
        set_stat(Stat.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)
        set_stat(Stat.PREEMPTIONS, stats.preemptions)
        set_stat(Stat.PROMPT_TOKENS, stats.prompt_tokens)
        set_stat(Stat.GENERATED_TOKENS, stats.generated_tokens)
        set_stat(Stat.REQUESTS_FINISHED, stats.requests_finished)
        set_stat(Stat.DRAFTS, stats.drafts)
        set_stat(Stat.DRAFT_TOKENS, stats.draft_tokens)
        set_stat(Stat.ACCEPTED_TOKENS, stats.accepted_tokens)
        set_stat(Stat.DRAFT_BREAK_EVEN, round(1000 * max(stats.draft_break_even, 0)))
        if stats.drafts:
            self._page.set_accepted_at(stats.accepted_at)
        set_stat(Stat.SHARED_QUERY_TOKENS, stats.shared_query_tokens)
        set_stat(Stat.SHARED_HIT_TOKENS, stats.shared_hit_tokens)
        further = {**core.elsewhere.counters, **scheduler.encoder_cache.counters}
        for name, value in further.items():
            set_stat(Stat[name.upper()], value)
        set_stat(Stat.DRAIN_NS, self.drain_ns)
        set_stat(Stat.SCHEDULE_NS, timings.schedule_ns)
        set_stat(Stat.PREPARE_NS, timings.prepare_ns)
        set_stat(Stat.EXECUTE_NS, timings.execute_ns)
        set_stat(Stat.SAMPLE_NS, timings.sample_ns)
        set_stat(Stat.APPLY_NS, timings.apply_ns)
        set_stat(Stat.PUBLISH_NS, self.publish_ns)
