"""Watches which positions a module uses while it runs.

This module knows torch's functions. It must not know what a step is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class Lookups(TorchFunctionMode):
    """Records which rows of tables a module looks up, those of positions among them.

    Args:
        attentions: modules that should not count tokens.

    Attributes:
        counts_tokens: whether one of them did.
    """

    def __init__(self, attentions: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.counts_tokens = False
        self._rows: list[Tensor] = []
        self._is_inside = False
        self._attentions = attentions
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Lookups:
        for each in self._attentions:
            self._hooks += [
                each.register_forward_pre_hook(lambda *_: self._enter(True)),
                each.register_forward_hook(lambda *_: self._enter(False)),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter(self, is_inside: bool) -> None:
        self._is_inside = is_inside

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is nn.functional.embedding:
            self._rows.append(args[0])
        self.counts_tokens |= self._is_inside and function is torch.arange
        return function(*args, **(kwargs or {}))

    def equals(self, other: Lookups) -> bool:
        """Whether both saw the same rows, in the same order."""
        pairs = zip(self._rows, other._rows, strict=False)
        return len(self._rows) == len(other._rows) and all(torch.equal(*pair) for pair in pairs)
