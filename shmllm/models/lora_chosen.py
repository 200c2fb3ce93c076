"""Which modules of a model low-rank adapters may change: the option `lora_target_modules`, as in
vLLM.

This module works on names alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shmllm.errors import EngineStartError

WEIGHT = ".weight"
"""The end of the name of a module's matrix."""
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that stand for others: the name of one of these chooses it, and its name all of them."""
_EXPERTS = "experts"


def chosen_names(names: Collection[str], chosen: Sequence[str]) -> set[str]:
    """Returns the parameters that belong to chosen modules.

    Args:
        names: the names of parameters.
        chosen: the ends of the names of modules, or whole names; all experts of a layer are one
            module, which ends in "experts".

    Raises:
        EngineStartError: there are none.
    """
    wanted = set(chosen)
    for joined, parts in _JOINED.items():
        if joined in chosen:
            wanted |= set(parts)
        elif not wanted.isdisjoint(parts):
            wanted.add(joined)
    found = {name for name in names if _is_among(name, wanted)}
    if not found:
        ends = sorted({name.removesuffix(WEIGHT).rpartition(".")[2] for name in names})
        raise EngineStartError(
            f"lora_target_modules {list(chosen)} names no module of the model that adapters can "
            f"change; these end in {', '.join(ends)}"
        )
    return found


def _is_among(name: str, wanted: set[str]) -> bool:
    module = name.removesuffix(WEIGHT)
    path = module.split(".")
    if _EXPERTS in path:  # which are one module
        path = path[: path.index(_EXPERTS) + 1]
    return not wanted.isdisjoint((module, ".".join(path), path[-1]))
