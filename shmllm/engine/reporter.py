"""What an engine shows of itself on its statistics page, for whoever looks.

Owns the running totals that nobody else counts: time spent with the rings, and how long
requests waited for their tokens. Must not know who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmllm.engine.core import EngineCore, StepTimings
from shmllm.ipc.control import ControlPage
from shmllm.ipc.stats import Histogram, Mark, Stat
from shmllm.outputs.columns import OutputColumns

STATE_PERIOD_NS = 5_000_000


class Reporter:
    """
    Args:
        page: where the numbers go.

    Attributes:
        drain_ns: time spent taking requests off the rings.
        publish_ns: time spent putting outputs on them.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._ttft = page.histogram(Histogram.TTFT)
        self._itl = page.histogram(Histogram.ITL)
        self._steps = page.histogram(Histogram.STEP)
        page.mark(Mark.STARTED)
        self._log = page.step_log()
        self._last_tokens_ns = self._logged_drain_ns = 0
        self._shown_ns = self._shown_changes = 0
        self.drain_ns = self.publish_ns = 0

    def imported(self) -> None:
        """What computes can be used now; what it computes with comes next."""
        self._page.mark(Mark.IMPORTED)

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights that were read, of all; also a sign of life."""
        self._page.set_stat(Stat.WEIGHT_BYTES_LOADED, done)
        self._page.set_stat(Stat.WEIGHT_BYTES_TOTAL, total)
        self._page.beat()

    def capturing(self, done: int, total: int) -> None:
        """Sizes of graphs that were captured, of all; also a sign of life."""
        self._page.set_stat(Stat.GRAPHS_CAPTURED, done)
        self._page.set_stat(Stat.GRAPHS_TOTAL, total)
        self._page.beat()

    def ready(self, core: EngineCore) -> None:
        self._page.set_stat(Stat.KV_BLOCKS_TOTAL, core.info.num_blocks)
        self._page.set_device(core.info.device)
        self._page.mark(Mark.READY)
        self._page.beat()

    def parked(self, times: int) -> None:
        """How often the engine slept."""
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
            phases: which have its moments, on `time.perf_counter_ns()`.
            stepped_ns: when its outputs were there.
            ended_ns: when they were published.
            outputs: by front end.
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
            )
        )
        self._logged_drain_ns = self.drain_ns

    def _count_tokens(self, ended_ns: int, outputs: Mapping[int, OutputColumns]) -> tuple[int, int]:
        """Count what the requests waited. Returns how many tokens there are, and how many of
        them are first ones."""
        num_sampled = num_first = 0
        for columns in outputs.values():
            num_sampled += len(columns.token_ids)
            num_first += len(columns.queued_ns)
            # On Linux both clocks are CLOCK_MONOTONIC.
            for queued_ns in columns.queued_ns:
                self._ttft.add(ended_ns - queued_ns)
        if num_sampled > num_first:
            self._itl.add(ended_ns - self._last_tokens_ns, num_sampled - num_first)
        if num_sampled:
            self._last_tokens_ns = ended_ns
        return num_sampled, num_first

    def state_if_due(self, core: EngineCore, now_ns: int) -> None:
        """After a step: its state if requests came or went with it, and else every
        STATE_PERIOD_NS. Two dozen words that the step has evicted from the cache take as long
        to write as its outputs."""
        stats = core.scheduler.stats
        changes = stats.requests_finished + stats.prompt_tokens + stats.preemptions
        if changes != self._shown_changes or now_ns - self._shown_ns >= STATE_PERIOD_NS:
            self._shown_changes, self._shown_ns = changes, now_ns
            self.state(core)

    def state(self, core: EngineCore) -> None:
        """Requests, blocks, tokens, and where the time went, as of now."""
        scheduler, show = core.scheduler, self._page.set_stat
        stats, timings = scheduler.stats, core.timings
        show(Stat.STEPS, stats.steps)
        show(Stat.RUNNING, scheduler.num_running)
        show(Stat.WAITING, scheduler.num_waiting)
        show(Stat.KV_BLOCKS_USED, core.num_used_blocks)
        show(Stat.PAUSED, bool(core.pauses))
        show(Stat.ASLEEP, core.sleeper.state)
        show(Stat.PREFIX_QUERY_TOKENS, stats.prefix_query_tokens)
        show(Stat.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)
        show(Stat.PREEMPTIONS, stats.preemptions)
        show(Stat.PROMPT_TOKENS, stats.prompt_tokens)
        show(Stat.GENERATED_TOKENS, stats.generated_tokens)
        show(Stat.REQUESTS_FINISHED, stats.requests_finished)
        show(Stat.DRAIN_NS, self.drain_ns)
        show(Stat.SCHEDULE_NS, timings.schedule_ns)
        show(Stat.PREPARE_NS, timings.prepare_ns)
        show(Stat.EXECUTE_NS, timings.execute_ns)
        show(Stat.SAMPLE_NS, timings.sample_ns)
        show(Stat.APPLY_NS, timings.apply_ns)
        show(Stat.PUBLISH_NS, self.publish_ns)
