"""Reads which of the low-rank adapters that a checkpoint has for tasks are added to its weights.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.file_names import is_file_name
from shmllm.models.fields import Fields

_TASKS, _TASK = "lora_adaptations", "default_task"
_TASKS_OF_V5 = ["retrieval", "text-matching", "clustering", "classification"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDirectory:
    """An adapter in a directory beside a checkpoint, in the format of PEFT.

    Attributes:
        task: the task, whose name the directory has: it lies where the digest of a checkpoint
            (`shared_kv.weights_digest`) looks for adapters.
    """

    task: str

    @property
    def path(self) -> str:
        """The directory, relative to the checkpoint's."""
        return f"adapters/{self.task}"


def read_task_adapters(fields: Fields) -> TaskAdapters | None:
    """Returns the adapters that ``lora_adaptations`` names, with the one that ``default_task`` has
    chosen, as sentence-transformers' users do; None: there are none."""
    tasks = fields.texts(_TASKS)
    chosen = None if fields.values.get(_TASK) is None else fields.text(_TASK)
    if chosen is not None:
        _check_chosen(fields, (_TASK, chosen), _TASKS, tasks)
    if not tasks:
        return None
    rank = fields.integer("lora_rank", 4)
    return TaskAdapters(
        count=len(tasks),
        chosen=None if chosen is None else tasks.index(chosen),
        rank=rank,
        scale=fields.number("lora_alpha", 1.0) / rank,
    )


def read_task_directory(fields: Fields) -> TaskDirectory | None:
    """Returns the adapter that ``jina_task`` has chosen of ``task_names``, "retrieval" unless it
    says otherwise, as in vLLM; None: there are none, because ``task_names`` is empty.

    Raises:
        EngineStartError: the fields are wrong, or a task has the name of no directory in
            ``adapters``, or of a hidden one.
    """
    name = "task_names"
    has_names = fields.values.get(name) is not None
    tasks = fields.texts(name) if has_names else _TASKS_OF_V5
    if not tasks and fields.values.get("jina_task") is None:
        return None
    for task in tasks:
        if not is_file_name(task) or task.startswith("."):
            raise fields.error(f"{name} has {task!r}, which can name no directory in 'adapters'")
    chosen = fields.text("jina_task", "retrieval")
    _check_chosen(fields, ("jina_task", chosen), name, tasks)
    return TaskDirectory(task=chosen)


def _check_chosen(fields: Fields, chosen: tuple[str, str], name: str, tasks: list[str]) -> None:
    """Raises EngineStartError if a field has a task that is none of those of another field.

    Args:
        fields: the fields of config.json.
        chosen: the name of the field, and the task.
        name: the name of the other one.
        tasks: what it has.
    """
    field, task = chosen
    if task not in tasks:
        known = ", ".join(map(repr, tasks)) or "none"
        raise fields.error(f"{field} {task!r} is none of {name}: {known}")
