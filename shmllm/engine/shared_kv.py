"""The engine's part in a prefix cache that engines share: when it joins one, and when it leaves.

Engines share blocks only if they compute the same bits, so the name of what they share is a hash of
all that decides these: the weights, the model, its dtypes, the kernels. The digest of the weights
is computed on a thread; until it is known the engine works alone. Written weights have no digest,
so the engine leaves; weights that are read from a directory again have one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.config.engine import EngineConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_groups import KVGroup
from shmllm.core.shared_blocks import Lender
from shmllm.engine.blocks_elsewhere import WeightsSource
from shmllm.engine.identity import describe, name_of
from shmllm.engine.runner import Runner
from shmllm.errors import EngineStartError, SegmentError, ShmLLMError
from shmllm.shared_kv.block_disk import NO_DISK
from shmllm.shared_kv.disk import Disk
from shmllm.shared_kv.folder import make_folder, make_root, root
from shmllm.shared_kv.joining import join
from shmllm.shared_kv.layout import RegionLayout, divide
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.tier import SharedTier, TierStats

logger = logging.getLogger(__name__)

START_WAIT_S, WAIT_S = 2.0, 0.5
"""How long a start, and an engine that wakes up or has read new weights, wait for the shared cache,
in seconds. A digest that has to be computed first may take longer; the engine then joins while it
works, and shares what it has cached until then."""


FLUSH_S = 3.0
"""How long the end of an engine, and its sleep, wait for what is not on disk yet, in seconds."""


class _Found(NamedTuple):
    """What a thread has found: a region, and the copies on disk of its blocks.

    disk: None: there are none.
    problem: why the disk cannot be used; empty if it can.
    """

    region: OwnRegion
    disk: Disk | None
    problem: str


class SharedKVCache:
    """`BlocksElsewhere` of an engine that shares a prefix cache with others.

    Args:
        config: the engine's configuration.
        runner: has the memory in which shared blocks are read.
        source: where the weights are from.
        kv_cache: uses them.
        on_problem: called with one sentence if the cache cannot be shared any more.

    Raises:
        EngineStartError: no region can be made as the options say.

    Attributes:
        stats: what the engine has lent and saved since its start.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        source: WeightsSource,
        kv_cache: KVCacheManager,
        on_problem: Callable[[str], None],
    ) -> None:
        self._config, self._runner, self._kv_cache = config, runner, kv_cache
        self._on_problem = on_problem
        self.stats = TierStats()
        self._tier: SharedTier | None = None
        self._disk: Disk | None = None
        self._joining: Future[_Found] | None = None
        self._is_stopped = threading.Event()
        self._is_asleep = False
        self._source: WeightsSource | None = source
        self._region_layout = self._layout()
        self.problem = ""
        self._check_start()
        self._begin(START_WAIT_S)

    @property
    def num_bytes(self) -> int | None:
        """The size of the region; None: the digest of the weights is still being computed."""
        if self._tier is not None:
            return self._tier.num_bytes
        return None if self._joining is not None else 0

    def _check_start(self) -> None:
        """Raise EngineStartError if no region can ever be made as the options say."""
        layout = self._region_layout
        if not layout.data_bytes:
            needed = sum(each.quantum * each.block_bytes for each in layout.sections)
            raise EngineStartError(
                f"shared_kv_cache_bytes {self._config.shared_kv.num_bytes:,} has no room for a "
                f"block; the smallest cache needs {needed:,}"
            )
        try:
            space = os.statvfs(make_root())
        except SegmentError as problem:
            raise EngineStartError(str(problem)) from problem
        most = space.f_blocks * space.f_frsize
        if layout.data_bytes > most:
            raise EngineStartError(
                f"shared_kv_cache_bytes {self._config.shared_kv.num_bytes:,} is more than "
                f"{root()} has in all, {most:,} bytes; docker: --shm-size"
            )

    @property
    def counters(self) -> dict[str, int]:
        """The statistics, by the lower-case name of their Stat."""
        stats = self.stats
        return {
            "shared_blocks_lent": stats.lent,
            "shared_blocks_saved": stats.saved,
            "shared_blocks_reused": stats.reused,
        }

    @property
    def tier(self) -> SharedTier | None:
        """The shared blocks; None: the engine works alone now."""
        return self._tier if self._tier is not None and self._tier.is_open else None

    def poll(self) -> None:
        """Join, if it is time to. Called between steps."""
        if self._is_asleep:
            self._is_asleep = False
            self._begin(WAIT_S)
        self._report_problems()
        joining = self._joining
        if joining is None or not joining.done():
            return
        self._joining = None
        memory = self._runner.shared_cache
        assert memory is not None
        try:
            region, self._disk, problem = joining.result()
            if problem:
                self._on_problem(problem)
            self._tier = SharedTier(
                region, memory, self._on_problem, self.stats, self._disk or NO_DISK
            )
        except Exception as error:  # the cache is a gain, and no reason to end the engine
            self._disk = None
            self.problem = f"the KV cache is not shared: {error}"
            self._on_problem(self.problem)
            return
        has_states = [int(group.rule.interval is not None) for group in self._runner.kv_groups]
        self._kv_cache.share(Lender(self._tier, has_states, memory.is_in_place))

    def weights_written(self, source: WeightsSource | None) -> None:
        self._stop(_close_region)
        self._source = source
        if self._tier is not None:
            self._tier.leave()
            self._part()
        if not self._is_asleep:
            self._begin(WAIT_S)

    def sleep(self) -> None:
        """Give the memory of the own blocks back. The next `poll`, when the engine is awake, joins
        again."""
        self._stop(_remove_region)
        self._is_asleep = True
        if self._disk is not None:
            self._disk.flush(FLUSH_S)
        if self._tier is not None:
            self._tier.remove()
            self._part()

    def reset(self) -> None:
        if self._tier is not None:
            self._tier.clear()

    def close(self) -> None:
        """Leave, after the last step. The own blocks stay for the next start."""
        self._stop(_close_region)
        disk = self._disk
        if disk is not None:
            disk.finish(FLUSH_S)
        if self._tier is not None:
            self._tier.close()
            self._part()
        if disk is not None:
            disk.join()
            self._report(disk)

    def _part(self) -> None:
        self._report_problems()
        self._tier = self._disk = None
        self._kv_cache.share(None)

    def _report_problems(self) -> None:
        if self._disk is not None:
            self._report(self._disk)

    def _report(self, disk: Disk) -> None:
        for problem in disk.take_problems():
            self._on_problem(problem)

    def _stop(self, end: Callable[[Future[_Found]], None]) -> None:
        """Join no more; `end` gets what the thread finds."""
        self._is_stopped.set()
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(end)

    def _begin(self, wait_s: float) -> None:
        """Look for a region on a thread, and wait for it for a while."""
        source = self._source
        if source is None:
            return
        self._is_stopped = stopped = threading.Event()
        self._joining = future = Future[_Found]()

        def run() -> None:
            try:
                future.set_result(self._find(source, stopped))
            except BaseException as problem:
                future.set_exception(problem)

        threading.Thread(target=run, name="shmllm-shared-kv", daemon=True).start()
        with suppress(TimeoutError):
            future.exception(wait_s)
        self.poll()

    def _find(self, source: WeightsSource, stopped: threading.Event) -> _Found:
        described = describe(self._config, self._runner, source, stopped)
        region = join(make_folder(name_of(described)[:16]), self._region_layout)
        try:
            return self._complete(region, Path(source.directory), described)
        except BaseException:
            region.close()
            raise

    def _complete(self, region: OwnRegion, directory: Path, described: Mapping[str, Any]) -> _Found:
        """Describe a region, and open its copy on disk."""
        is_loaded = directory == Path(self._config.load.directory)
        name = self._config.load.model_name if is_loaded else ""
        began = {"pid": os.getpid(), "began": time.time(), "name": name or directory.name}
        region.describe(began | {"model": str(directory)} | _shown(described))
        shared = self._config.shared_kv
        if shared.path is None:
            return _Found(region, None, "")
        try:
            return _Found(region, Disk(Path(shared.path), region, shared.disk_bytes), "")
        except (ShmLLMError, OSError) as problem:
            return _Found(region, None, f"the KV cache is not kept on disk: {problem}")

    def _layout(self) -> RegionLayout:
        num_bytes = self._config.shared_kv.num_bytes
        assert num_bytes is not None
        shapes = self._runner.block_parts
        groups = self._runner.kv_groups
        sections = divide(
            num_bytes, *shapes, _blocks_per_state(groups, self._config.cache.block_size)
        )
        return RegionLayout(sections)


def _blocks_per_state(groups: tuple[KVGroup, ...], block_size: int) -> float:
    """How many blocks of keys and values a request fills for each state."""
    intervals = [group.rule.interval for group in groups if group.rule.interval is not None]
    num_groups = sum(group.rule.interval is None for group in groups)
    return num_groups * intervals[0] / block_size if intervals else 0.0


def _shown(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a description that people read."""
    names = ("weights", "dtype", "kv_cache_dtype", "quantization", "block_size")
    return {name: described[name] for name in (*names, "num_ranks") if name in described}


def _close_region(joining: Future[_Found]) -> None:
    if joining.exception() is None:
        region, disk, _ = joining.result()
        region.close()
        if disk is not None:
            disk.finish()


def _remove_region(joining: Future[_Found]) -> None:
    if joining.exception() is None:
        joining.result().region.unlink()
    _close_region(joining)
