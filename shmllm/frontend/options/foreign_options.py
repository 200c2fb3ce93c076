"""vLLM's options that shmllm does not implement, and how `LLM` treats each of them.

An option in ONLY_VALUES must have a value that describes what this engine does anyway; any other
value is an error. An option in NO_EFFECT is ignored; a value other than None and vLLM's default
causes a warning in the log. An option in TRANSLATED stands for options of ours. An option in no
table is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.frontend.options.foreign_tables import NO_EFFECT, ONLY_VALUES
from shmllm.frontend.options.kv_transfer import read_kv_transfer_config
from shmllm.frontend.options.speculative import SHORT_NAMES, with_keys_of_short_names

logger = logging.getLogger(__name__)

OTHER_NAMES: dict[str, dict[str, str]] = {"model_impl": {"vllm": "shmllm"}}
"""What values of vLLM's are called here, for options that both have."""

TASKS: dict[str, dict[str, Any]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling"},
    "score": {"runner": "pooling"},
}
"""What vLLM's former option `task` means."""


def _read_task(task: Any) -> dict[str, Any]:
    if task not in TASKS:
        raise EngineStartError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]


TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "kv_transfer_config": read_kv_transfer_config,
    "task": _read_task,
}
"""Options that stand for options of ours, which a function returns."""

FOREIGN_NAMES = (*ONLY_VALUES, *NO_EFFECT, *TRANSLATED, *SHORT_NAMES)


def check_foreign_options(callee: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of vLLM's options, and log a warning for those without an effect.

    Args:
        callee: the name of the class that has the options, for messages.
        given: the options by name.

    Returns:
        The options that are in no table, with the values that they have here.

    Raises:
        EngineStartError: an option of ONLY_VALUES has another value, or one of TRANSLATED is not
            valid, or stands for an option that is given, too.
    """
    unknown: dict[str, Any] = {}
    for name, value in with_keys_of_short_names(given).items():
        if name in ONLY_VALUES:
            allowed, reason = ONLY_VALUES[name]
            if not any(value == each and type(value) is type(each) for each in allowed):
                values = " or ".join(map(repr, allowed))
                raise EngineStartError(f"{name} can only be {values}: {reason}; got {value!r}")
        elif name in NO_EFFECT:
            default, reason = NO_EFFECT[name]
            if value is not None and value != default:
                logger.warning("%s: %s=%r has no effect: %s", callee, name, value, reason)
        elif name in TRANSLATED:
            found = {} if value is None else TRANSLATED[name](value)
            if twice := [each for each in found if given.get(each) is not None]:
                raise EngineStartError(f"{twice[0]} is given twice, here and in {name}")
            unknown |= found
        else:
            names = OTHER_NAMES.get(name, {})
            unknown[name] = names.get(value, value) if isinstance(value, str) else value
    return unknown
