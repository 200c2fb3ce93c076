"""`LoRARequest`, which trainers extend by fields of their own."""

from __future__ import annotations

from typing import Any

import shmllm.params.lora


class LoRARequest(shmllm.params.lora.LoRARequest):
    """`shmllm.LoRARequest`. The annotations of a subclass are further keyword arguments, with the
    values behind them as defaults, as in subclasses of vLLM's, which is a msgspec Struct."""

    __slots__ = ()

    def __init__(self, *arguments: Any, is_3d_lora_weight: bool = False, **given: Any) -> None:
        """`is_3d_lora_weight` is ignored: adapters of both forms are read."""
        super().__init__(*arguments, **given)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = vars(cls).get("__annotations__", ())
        # msgspec.field(default=...) has the default as an attribute.
        values = {name: vars(cls)[name] for name in names if name in vars(cls)}
        defaults = {name: getattr(value, "default", value) for name, value in values.items()}

        def initialize(self: Any, *arguments: Any, **given: Any) -> None:
            for name in names:
                if name not in given and name not in defaults:
                    raise TypeError(f"{cls.__name__} needs the keyword argument {name!r}")
                object.__setattr__(self, name, given.pop(name, defaults.get(name)))
            super(cls, self).__init__(*arguments, **given)

        cls.__init__ = initialize  # type: ignore[method-assign]
