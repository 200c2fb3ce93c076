"""The drafters by method."""

from __future__ import annotations

from collections.abc import Callable

from shmllm.config.speculative import Method, SpeculativeConfig
from shmllm.core.scheduler import Scheduler
from shmllm.engine.drafting.drafter import Drafter, RunnerDrafter
from shmllm.engine.drafting.drafting import Drafting
from shmllm.engine.drafting.ngram import NgramDrafter
from shmllm.engine.drafting.suffix import SuffixDrafter

DRAFTERS: dict[Method, Callable[[SpeculativeConfig], Drafter]] = {
    "ngram": lambda config: NgramDrafter(config.lookup_min, config.lookup_max),
    "suffix": SuffixDrafter,
    "draft_model": lambda _: RunnerDrafter(),
    "mtp": lambda _: RunnerDrafter(),
    "eagle": lambda _: RunnerDrafter(),
    "eagle3": lambda _: RunnerDrafter(),
    "dflash": lambda _: RunnerDrafter(),
    "medusa": lambda _: RunnerDrafter(),
}


def make_drafting(
    config: SpeculativeConfig, scheduler: Scheduler, keeps_state_of: Callable[[int], bool]
) -> Drafting | None:
    """Make what drafts for the requests of a scheduler; None: the options ask for no drafts.

    Args:
        config: the options.
        scheduler: has the requests.
        keeps_state_of: whether no tokens may be drafted for the request in a row.
    """
    if config.method is None:
        return None
    return Drafting(config, DRAFTERS[config.method](config), scheduler, keeps_state_of)
