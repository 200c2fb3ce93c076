"""Reads which of the low-rank adapters that a checkpoint has for tasks are added to its weights.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.fields import Fields

_TASKS, _TASK = "lora_adaptations", "default_task"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAdapters:
    """The adapters that a checkpoint has beside its weights (Sturua et al., 2024).

    Attributes:
        count: the number of tasks.
        chosen: the task whose adapters are added; None: none are.
        rank: the rank of each.
        scale: the factor of the product of an adapter's matrices.
    """

    count: int
    chosen: int | None
    rank: int
    scale: float


def read_task_adapters(fields: Fields) -> TaskAdapters | None:
    """Returns the adapters that ``lora_adaptations`` names, with the one that ``default_task`` has
    chosen, as sentence-transformers' users do; None: there are none."""
    tasks = fields.texts(_TASKS)
    chosen = None if fields.values.get(_TASK) is None else fields.text(_TASK)
    if chosen is not None and chosen not in tasks:
        known = ", ".join(map(repr, tasks)) or "none"
        raise fields.error(f"{_TASK} {chosen!r} is none of {_TASKS}: {known}")
    if not tasks:
        return None
    rank = fields.integer("lora_rank", 4)
    return TaskAdapters(
        count=len(tasks),
        chosen=None if chosen is None else tasks.index(chosen),
        rank=rank,
        scale=fields.number("lora_alpha", 1.0) / rank,
    )
