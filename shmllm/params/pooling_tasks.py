"""The names of pooling tasks and pooling types, which are vLLM's, and the errors about others."""

from __future__ import annotations

from shmllm.errors import RequestError
from shmllm.params.pooling_ranges import check_choice

POOLING_TASKS = ("embed", "token_embed", "classify", "token_classify", "plugin")
TOKEN_TASKS = ("token_embed", "token_classify")
"""The tasks whose results have a row for each token."""
PLUGIN_TASK = "plugin"

SEQ_POOLING_TYPES = ("CLS", "LAST", "MEAN")
"""The pooling types that make one vector of a prompt."""
TOK_POOLING_TYPES = ("ALL", "STEP")
"""The pooling types that keep a row for each token, or for each token that ends a step."""
POOLING_TYPES = (*SEQ_POOLING_TYPES, *TOK_POOLING_TYPES)

_REMOVED_TASKS = {
    "score": "`score` task was removed; use `classify` instead.",
    "encode": "`encode` task was removed; use `token_embed` or `token_classify` instead.",
}


def check_removed_task(task: object, parameter: str = "task") -> None:
    """Raise RequestError, in vLLM's words, if this is the name of a task that vLLM had once.

    Args:
        task: the value.
        parameter: what errors call it.
    """
    if isinstance(task, str) and task in _REMOVED_TASKS:
        raise RequestError(_REMOVED_TASKS[task], parameter=parameter, value=task)


def check_task(task: object, parameter: str = "task") -> None:
    """Raise RequestError unless this is None or the name of a pooling task; as above."""
    check_removed_task(task, parameter)
    check_choice(parameter, task, POOLING_TASKS)
