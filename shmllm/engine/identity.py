"""What decides the bits of an engine's keys and values.

Engines for which all of it is equal can use each other's blocks.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.config.engine import EngineConfig
from shmllm.engine.blocks_elsewhere import WeightsSource
from shmllm.engine.runner import Runner
from shmllm.errors import ShmLLMError
from shmllm.shared_kv.layout import VERSION
from shmllm.shared_kv.weights_digest import (
    compute_digest,
    digest_of_random,
    has_changed_since,
    known_digest,
)


def name_of(described: Mapping[str, Any]) -> str:
    """The SHA-256 of a description, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def describe(
    config: EngineConfig, runner: Runner, source: WeightsSource, stopped: threading.Event
) -> dict[str, Any]:
    """Describe all that decides the bits of keys and values. Paths have no influence.

    Args:
        config: the engine's configuration.
        runner: has the model.
        source: where its weights are from.
        stopped: ends the computation of a digest.

    Raises:
        ShmLLMError: the weights have no digest, or their files have changed since they were read.
        OSError: they cannot be read.
    """
    directory = Path(source.directory)
    if source.is_random:
        text = (directory / "config.json").read_text(errors="replace")
        weights = digest_of_random(text, config.load.seed)
    else:
        weights = _digest(directory, stopped)
    if has_changed_since(directory, source.began_s):
        raise ShmLLMError(f"{directory} has changed since the weights were read")
    draft = config.speculative.model_directory
    return {
        "format": VERSION,
        "weights": weights,
        "draft": _digest(Path(draft), stopped) if draft else "",
        "block_size": config.cache.block_size,
        "num_ranks": config.parallel.tensor_parallel_size,
        "groups": repr(runner.kv_groups),
        **runner.numerics(),
    }


def _digest(directory: Path, stopped: threading.Event) -> str:
    found = known_digest(directory) or compute_digest(directory, stopped.is_set)
    if found is None:
        raise ShmLLMError(f"the digest of the weights in {directory} cannot be computed")
    return found
