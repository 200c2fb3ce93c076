"""Makes the logits processors that an engine's options and installed plugins name.

Classes are imported before weights are read, so that a wrong name ends a start at once. This module
must not know when the processors run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shmllm.config.info import EngineInfo
from shmllm.config.views import VllmConfigView
from shmllm.errors import EngineStartError
from shmllm.plugins.entry_points import PROCESSORS, load_plugins, vllm_names
from shmllm.plugins.logits_processor import LogitsProcessor
from shmllm.plugins.qualified_names import in_one_line, load_object, shown
from shmllm.worker.arrays import IntArray
from shmllm.worker.custom_processors import CustomProcessors, NamedProcessor

ProcessorClasses = dict[str, type[LogitsProcessor]]
"""The classes of logits processors by name, in the order in which they are called."""


def load_processor_classes(names: Sequence[str]) -> tuple[ProcessorClasses, list[str]]:
    """Import the classes of installed plugins, then those that the options name.

    Args:
        names: what the option `logits_processors` has.

    Returns:
        The classes, and a sentence for each plugin that cannot be used.

    Raises:
        EngineStartError: a name of the option is wrong.
    """
    classes: ProcessorClasses = {}
    plugins, problems = load_plugins(PROCESSORS)
    for plugin, found in plugins.items():
        try:
            _check(plugin, found)
        except EngineStartError as problem:
            problems.append(f"the plugin {plugin} is not used: {problem}")
        else:
            classes[f"{found.__module__}:{found.__qualname__}"] = found
    for name in names:
        with vllm_names():
            found = load_object(name)
        own = shown(name)
        _check(own, found)
        if name != own and own in classes:
            raise EngineStartError(f"two logits processors are named {own}; rename one of them")
        classes[own] = found
    return classes, problems


def make_processors(
    classes: ProcessorClasses, info: EngineInfo, device: torch.device, token_ids: IntArray
) -> CustomProcessors:
    """Make the processors of an engine.

    Args:
        classes: their classes.
        info: what the engine reports about itself.
        device: where logits are.
        token_ids: as for `CustomProcessors`.

    Raises:
        EngineStartError: a constructor raised.
    """
    view = VllmConfigView.of(info, {})
    made = []
    for name, own in classes.items():
        try:
            named = NamedProcessor(name, own(view, device, device.type == "cuda"))
            named.processor.is_argmax_invariant()
            _ = named.functions
        except Exception as problem:
            raise EngineStartError(
                f"the logits processor {name} cannot be made: {in_one_line(problem)}"
            ) from problem
        made.append(named)
    return CustomProcessors(made, token_ids)


def _check(name: str, found: Any) -> None:
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        base = f"{LogitsProcessor.__module__}:{LogitsProcessor.__qualname__}"
        raise EngineStartError(
            f"the logits processor {name} is no subclass of {base}, which `import vllm` finds "
            "as well, unless vLLM itself is installed"
        )
