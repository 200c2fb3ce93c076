"""`EngineArgs`: the options of an LLM as a dataclass, under vLLM's names.

Owns the fields, which are taken from where the options are: the signature of `LLM`, and the
tables of `foreign_options` for those of vLLM's that this engine does not have.
"""

from __future__ import annotations

import inspect
from dataclasses import field, fields, make_dataclass
from typing import Any

from shmllm.frontend.foreign_options import NO_EFFECT, ONLY_VALUES
from shmllm.frontend.llm import LLM
from shmllm.params.keywords import reject_unknown_options

_NOT_FIELDS = ("self", "others")


def _defaults() -> dict[str, Any]:
    parameters = inspect.signature(LLM.__init__).parameters.items()
    own = {name: each.default for name, each in parameters if name not in _NOT_FIELDS}
    foreign: dict[str, Any] = {name: each.allowed[0] for name, each in ONLY_VALUES.items()}
    return own | foreign | {name: each.default for name, each in NO_EFFECT.items()}


_DEFAULTS = _defaults()
_Fields: Any = make_dataclass(
    "_Fields", [(name, Any, field(default=default)) for name, default in _DEFAULTS.items()]
)


class EngineArgs(_Fields):  # type: ignore[misc]
    """Every option of `LLM`, and those of vLLM's that can have one value here or have no
    effect; docs/vllm.md has the table. None for an option that cannot be None means its
    default.

    Raises:
        TypeError: an unknown option; names the nearest one.

    Example:
        LLM.from_engine_args(EngineArgs(model="tiny", max_num_seqs=16))
    """

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        reject_unknown_options(type(self).__name__, options, (f.name for f in fields(self)))
        super().__init__(model=model, **options)
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.llm_options().items())
        return f"{type(self).__name__}({shown})"

    def llm_options(self) -> dict[str, Any]:
        """What to construct an `LLM` with: the fields that differ from their defaults."""
        given = ((name, getattr(self, name)) for name in _DEFAULTS)
        return {name: value for name, value in given if value != _DEFAULTS[name]}


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`."""
