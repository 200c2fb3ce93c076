"""Translates vLLM's option `kv_transfer_config` into the options for a KV connector."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from shmllm.errors import EngineStartError, nearest

logger = logging.getLogger(__name__)

OPTION = "kv_transfer_config"
OWN = ("kv_connector", "kv_connector_extra_config", "kv_role")
"""The keys that are options of ours."""
MODULE = "kv_connector_module_path"
ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "enable_permute_local_kv": (False, "blocks are opaque bytes"),
    "kv_load_failure_policy": (
        "fail",
        "a request whose blocks cannot be loaded ends with an error",
    ),
    "kv_buffer_device": ("cpu", "a connector reads and writes the host's memory"),
}
"""vLLM's keys that must have one value, and why."""
NO_EFFECT = ("engine_id", "kv_ip", "kv_port", "kv_rank", "kv_parallel_size", "kv_buffer_size")
"""vLLM's keys for its own connectors, which are ignored."""
_KEYS = (*OWN, MODULE, *ONLY_VALUES, *NO_EFFECT)


def read_kv_transfer_config(config: Any) -> dict[str, Any]:
    """The options that a `kv_transfer_config` stands for: a mapping, the same as JSON text, or an
    object with these attributes; {} if it names no connector.

    Raises:
        EngineStartError: it is something else, has an unknown key, or a value is not valid.
    """
    given = {key: value for key, value in _as_mapping(config).items() if value is not None}
    for key, value in given.items():
        if key not in _KEYS:
            near = nearest(key, sorted(_KEYS))
            hint = f"; the nearest is {near!r}" if near else ""
            raise EngineStartError(f"{OPTION} has no key {key!r}{hint}")
        if key in ONLY_VALUES and value != ONLY_VALUES[key][0]:
            allowed, reason = ONLY_VALUES[key]
            raise EngineStartError(f"{OPTION}: {key} can only be {allowed!r}: {reason}")
    if "kv_connector" not in given:
        return {}
    if ignored := [key for key in NO_EFFECT if key in given and key != "engine_id"]:
        logger.warning("%s: %s has no effect: a connector has its own", OPTION, ", ".join(ignored))
    found = {key: given[key] for key in OWN if key in given}
    if MODULE in given:
        found["kv_connector"] = f"{given[MODULE]}:{given['kv_connector']}"
    return found


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as problem:
            raise EngineStartError(f"{OPTION} is not valid JSON: {problem}") from None
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "kv_connector"):
        # vLLM's class gives the keys of its own connectors a value, whatever a program sets.
        return {key: getattr(config, key, None) for key in (*OWN, MODULE)}
    raise EngineStartError(
        f'{OPTION} must be a mapping such as {{"kv_connector": "Class", "{MODULE}": "module"}}, '
        f"got {config!r}"
    )
