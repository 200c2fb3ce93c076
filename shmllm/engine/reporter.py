"""What an engine shows of itself on its statistics page, for whoever looks.

Owns the running totals that nobody else counts: time spent with the rings. Must not know
who reads them.
"""

from __future__ import annotations

from shmllm.engine.core import EngineCore
from shmllm.ipc.control import ControlPage
from shmllm.ipc.layout import Stat


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
        self.drain_ns = self.publish_ns = 0

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights that were read, of all; also a sign of life."""
        self._page.set_stat(Stat.WEIGHT_BYTES_LOADED, done)
        self._page.set_stat(Stat.WEIGHT_BYTES_TOTAL, total)
        self._page.beat()

    def ready(self, core: EngineCore) -> None:
        self._page.set_stat(Stat.KV_BLOCKS_TOTAL, core.facts.num_blocks)
        self._page.beat()

    def parked(self, times: int) -> None:
        """How often the engine slept."""
        self._page.set_stat(Stat.TIMES_PARKED, times)

    def step(self, step_ns: int) -> None:
        """How long the last step took, from its schedule to its published outputs."""
        self._page.set_stat(Stat.STEP_NS, step_ns)

    def state(self, core: EngineCore) -> None:
        """Requests, blocks, tokens, and where the time went, as of now."""
        scheduler, show = core.scheduler, self._page.set_stat
        stats, phases = scheduler.stats, core.phases
        show(Stat.STEPS, stats.steps)
        show(Stat.RUNNING, scheduler.num_running)
        show(Stat.WAITING, scheduler.num_waiting)
        show(Stat.KV_BLOCKS_USED, core.num_used_blocks)
        show(Stat.PAUSED, bool(core.holds))
        show(Stat.PREFIX_QUERY_TOKENS, stats.prefix_query_tokens)
        show(Stat.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)
        show(Stat.PREEMPTIONS, stats.preemptions)
        show(Stat.PROMPT_TOKENS, stats.prompt_tokens)
        show(Stat.GENERATED_TOKENS, stats.generated_tokens)
        show(Stat.REQUESTS_FINISHED, stats.requests_finished)
        show(Stat.DRAIN_NS, self.drain_ns)
        show(Stat.SCHEDULE_NS, phases.schedule_ns)
        show(Stat.EXECUTE_NS, phases.execute_ns)
        show(Stat.APPLY_NS, phases.apply_ns)
        show(Stat.PUBLISH_NS, self.publish_ns)
