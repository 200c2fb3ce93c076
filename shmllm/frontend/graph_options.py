"""From vLLM's options about CUDA graphs to a GraphConfig.

Owns what of vLLM's `compilation_config` means something here: graphs do, compilers do not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shmllm.config.graphs import GraphConfig
from shmllm.errors import EngineStartError

logger = logging.getLogger(__name__)

_MODE, _SIZES, _LARGEST = (
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
)


def make_graph_config(
    compilation_config: Any,
    cudagraph_capture_sizes: Any,
    max_cudagraph_capture_size: int | None,
    enforce_eager: bool,
) -> GraphConfig:
    """
    Args:
        compilation_config: None, a level, which has no effect, or the three names above as a
            mapping or as attributes; other keys of a mapping have no effect, with a warning.

    Raises:
        EngineStartError: a value is wrong, or was given in two places.
    """
    given = _read(compilation_config)
    others = {_SIZES: cudagraph_capture_sizes, _LARGEST: max_cudagraph_capture_size}
    for name, value in others.items():
        if value is not None and given.setdefault(name, value) is not value:
            raise EngineStartError(f"{name} is given twice, here and in compilation_config")
    sizes = given.get(_SIZES)
    try:
        rising = None if sizes is None else tuple(sorted({*sizes}))
    except TypeError:
        raise EngineStartError(f"{_SIZES} must be a list of whole numbers, got {sizes!r}") from None
    usual = GraphConfig(
        capture_sizes=rising, max_capture_size=given.get(_LARGEST), enforce_eager=enforce_eager
    )
    if _MODE not in given:
        return usual
    mode = given[_MODE]
    return replace(usual, mode=str(getattr(mode, "name", mode)).upper())


def _read(config: Any) -> dict[str, Any]:
    """What is given of the three."""
    if isinstance(config, Mapping):
        unknown = [name for name in config if name not in (_MODE, _SIZES, _LARGEST)]
        for name in unknown:
            logger.warning("compilation_config: %s has no effect: nothing is compiled", name)
        found = {name: value for name, value in config.items() if name not in unknown}
    elif isinstance(config, int) and not isinstance(config, bool):
        logger.warning("compilation_config=%d has no effect: nothing is compiled", config)
        found = {}
    elif config is None or any(hasattr(config, name) for name in (_MODE, _SIZES, _LARGEST)):
        found = {name: getattr(config, name, None) for name in (_MODE, _SIZES, _LARGEST)}
    else:
        raise EngineStartError(
            f"compilation_config must be a mapping with {_MODE}, {_SIZES} or {_LARGEST}, "
            f"got {config!r}"
        )
    return {name: value for name, value in found.items() if value is not None}
