"""The engine's part in a prefix cache that engines share: when it joins one, and when it leaves.

Engines share blocks only if they compute the same bits, so the name of what they share is a hash of
all that decides these: the weights, the model, its dtypes, the kernels. The digest of the weights
is computed on a thread; until it is known the engine works alone. Written weights have no digest,
so the engine leaves; weights that are read from a directory again have one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmllm.config.engine import EngineConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_groups import KVGroup
from shmllm.core.shared_blocks import Lender
from shmllm.engine.runner import Runner
from shmllm.errors import ShmLLMError
from shmllm.shared_kv.folder import make_folder
from shmllm.shared_kv.joining import join
from shmllm.shared_kv.layout import VERSION, RegionLayout, divide
from shmllm.shared_kv.region import OwnRegion
from shmllm.shared_kv.tier import SharedTier
from shmllm.shared_kv.weights_digest import compute_digest, digest_of_random, known_digest

logger = logging.getLogger(__name__)

START_WAIT_S, WAIT_S = 2.0, 0.5
"""How long a start, and an engine that wakes up or has read new weights, wait for the shared cache,
in seconds. A digest that has to be computed first may take longer; the engine then joins while it
works, and shares what it has cached until then."""


class SharedKVCache:
    """
    Args:
        config: the engine's configuration.
        runner: has the memory in which shared blocks are read.
        kv_cache: uses them.
        on_problem: called with one sentence if the cache cannot be shared any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        kv_cache: KVCacheManager,
        on_problem: Callable[[str], None],
    ) -> None:
        self._config, self._runner, self._kv_cache = config, runner, kv_cache
        self._on_problem = on_problem
        self._tier: SharedTier | None = None
        self._joining: Future[OwnRegion] | None = None
        self._is_stopped = threading.Event()
        self._is_asleep = False
        self._directory: str | None = config.load.directory
        self._begin(START_WAIT_S)

    @property
    def tier(self) -> SharedTier | None:
        """The shared blocks; None: the engine works alone now."""
        return self._tier

    def poll(self) -> None:
        """Join, or leave, if it is time to. Called between steps."""
        if self._is_asleep:
            self._is_asleep = False
            self._begin(WAIT_S)
        if self._tier is not None and not self._tier.is_open:
            self._part()
        joining = self._joining
        if joining is None or not joining.done():
            return
        self._joining = None
        memory = self._runner.shared_cache
        assert memory is not None
        try:
            self._tier = SharedTier(joining.result(), memory, self._on_problem)
        except (ShmLLMError, OSError) as problem:
            self._on_problem(f"the KV cache is not shared: {problem}")
            return
        has_states = [int(group.rule.interval is not None) for group in self._runner.kv_groups]
        self._kv_cache.share(Lender(self._tier, has_states, memory.is_in_place))

    def weights_written(self, directory: str | None = None) -> None:
        """The engine has other weights now.

        Args:
            directory: where they were read from; None: from no directory.
        """
        self._stop()
        self._is_asleep = False
        self._directory = directory
        if self._tier is not None:
            self._tier.leave()
            self._part()
        self._begin(WAIT_S)

    def sleep(self) -> None:
        """Give the memory of the own blocks back. The next `poll`, when the engine is awake, joins
        again."""
        self._stop()
        self._is_asleep = True
        if self._tier is not None:
            self._tier.remove()
            self._part()

    def clear(self) -> None:
        """Forget the own blocks."""
        if self._tier is not None:
            self._tier.clear()

    def close(self) -> None:
        """Leave. The own blocks stay for the next start."""
        self._stop()
        if self._tier is not None:
            self._tier.leave()
            self._part()

    def _part(self) -> None:
        self._tier = None
        self._kv_cache.share(None)

    def _stop(self) -> None:
        self._is_stopped.set()
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(_close_region)

    def _begin(self, wait_s: float) -> None:
        """Look for a region on a thread, and wait for it for a while."""
        if self._config.shared_kv.num_bytes is None or self._directory is None:
            return
        self._is_stopped = stopped = threading.Event()
        self._joining = future = Future[OwnRegion]()
        directory = Path(self._directory)

        def run() -> None:
            try:
                future.set_result(self._find(directory, stopped))
            except BaseException as problem:
                future.set_exception(problem)

        threading.Thread(target=run, name="shmllm-shared-kv", daemon=True).start()
        with suppress(TimeoutError):
            future.exception(wait_s)
        self.poll()

    def _find(self, directory: Path, stopped: threading.Event) -> OwnRegion:
        described = self._describe(directory, stopped)
        key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        region = join(make_folder(key), self._layout())
        region.describe({"pid": os.getpid(), "began": time.time()} | _shown(described))
        return region

    def _describe(self, directory: Path, stopped: threading.Event) -> dict[str, Any]:
        """All that decides the bits of keys and values."""
        load = self._config.load
        if load.load_format == "dummy" and directory == Path(load.directory):
            weights = digest_of_random((directory / "config.json").read_text(), load.seed)
        else:
            weights = _digest(directory, stopped)
        draft = self._config.speculative.model_directory
        return {
            "format": VERSION,
            "model": str(directory),
            "weights": weights,
            "draft": _digest(Path(draft), stopped) if draft else "",
            "block_size": self._config.cache.block_size,
            "num_ranks": self._config.parallel.tensor_parallel_size,
            "groups": repr(self._runner.kv_groups),
            **self._runner.numerics(),
        }

    def _layout(self) -> RegionLayout:
        num_bytes = self._config.shared_kv.num_bytes
        assert num_bytes is not None
        shapes = self._runner.block_parts
        groups = self._runner.kv_groups
        sections = divide(
            num_bytes, *shapes, _blocks_per_state(groups, self._config.cache.block_size)
        )
        return RegionLayout(sections)


def _digest(directory: Path, stopped: threading.Event) -> str:
    found = known_digest(directory) or compute_digest(directory, stopped.is_set)
    if found is None:
        raise ShmLLMError(f"the digest of the weights in {directory} cannot be computed")
    return found


def _blocks_per_state(groups: tuple[KVGroup, ...], block_size: int) -> float:
    """How many blocks of keys and values a request fills for each state."""
    intervals = [group.rule.interval for group in groups if group.rule.interval is not None]
    num_groups = sum(group.rule.interval is None for group in groups)
    return num_groups * intervals[0] / block_size if intervals else 0.0


def _shown(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a description that people read."""
    names = ("model", "weights", "dtype", "kv_cache_dtype", "quantization", "block_size")
    return {name: described[name] for name in (*names, "num_ranks") if name in described}


def _close_region(joining: Future[OwnRegion]) -> None:
    if joining.exception() is None:
        joining.result().close()
