"""`EngineArgs`: the options of an LLM as a dataclass, under vLLM's names.

The fields are the rows of the table of options, and the options of vLLM that `foreign_options`
lists.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from typing import Any

from shmllm.frontend.options.engine_options import LLM_OPTIONS
from shmllm.frontend.options.foreign_options import TRANSLATED
from shmllm.frontend.options.foreign_tables import NO_EFFECT, ONLY_VALUES
from shmllm.frontend.options.speculative import SHORT_NAMES
from shmllm.params.signatures import takes_fields_of
from shmllm.params.unknown_options import reject_unknown_options

_DEFAULTS: dict[str, Any] = (
    {each.name: each.default for each in LLM_OPTIONS}
    | {name: each.allowed[0] for name, each in ONLY_VALUES.items()}
    | {name: each.default for name, each in NO_EFFECT.items()}
    | dict.fromkeys(TRANSLATED)
    | dict.fromkeys(SHORT_NAMES)
)
_Fields: Any = make_dataclass(
    "_Fields", [(name, Any, field(default=default)) for name, default in _DEFAULTS.items()]
)


@takes_fields_of(_Fields, num_positional=1)
class EngineArgs(_Fields):  # type: ignore[misc]
    """All options of `LLM`, and the options of vLLM that can have only one value here or have no
    effect; docs/vllm.md lists them. None stands for the default of an option that cannot be None.

    Raises:
        TypeError: an unknown option; names the nearest known one.

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
        given = ", ".join(f"{name}={value!r}" for name, value in self.llm_options().items())
        return f"{type(self).__name__}({given})"

    def llm_options(self) -> dict[str, Any]:
        """The keyword arguments for `LLM`: the fields that differ from their defaults."""
        given = ((name, getattr(self, name)) for name in _DEFAULTS)
        return {name: value for name, value in given if value != _DEFAULTS[name]}


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`."""
