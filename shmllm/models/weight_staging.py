"""New weights, kept beside those in force until all of them are there.

Owns the memory they wait in and what was found wrong with them. Must not know who sends them.

The memory is private and anonymous, in huge pages where the system gives them: of 540 MB the
first write then takes as long as a copy, five times as long in a memfd, which has small ones.
It is reserved for all weights, and exists for what was written.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.layers import Matrix
from shmllm.models.weight_update import find_problem, is_finite, is_ignored, not_finite, refuse

if TYPE_CHECKING:
    from shmllm.models.decoder import DecoderModel

ALIGNMENT_BYTES = 64


class StagedWeights:
    """
    Args:
        model: whose weights they are to be. It is not touched before `copy_into_place`.

    Raises:
        RequestError: there is no memory for them.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._destinations = model.named_weights()
        self._offsets: dict[str, int] = {}
        self._num_staged: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        size = 0
        for name, (view, *_) in self._destinations.items():
            self._offsets[name] = size
            size += -(-_num_bytes(view) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as problem:
            raise RequestError(
                f"no memory to stage {size / 2**20:,.0f} MiB of weights: {problem.strerror}"
            ) from problem
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # The mapping goes with the last tensor over it.
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def put(self, name: str, shape: Sequence[int], begin: int, piece: Tensor) -> None:
        """Take a piece of a tensor. What is wrong with it is kept for `check`.

        Args:
            name: as in a Hugging Face checkpoint.
            shape: of the whole tensor.
            begin: which element of the flattened tensor the piece starts with. A tensor's
                pieces come in order; one that starts again replaces what came before.
            piece: [elements]; copied, and converted to the model's dtype.
        """
        if is_ignored(self._model, name) or name in self._problems:
            return
        problem = find_problem(self._destinations, name, shape, piece.dtype)
        if problem is None:
            problem = self._copy(name, begin, piece)
        if problem is not None:
            self._problems[name] = problem

    def check(self) -> None:
        """Raise RequestError, naming them, if tensors were wrong."""
        refuse(self._problems)

    def check_complete(self, required: Collection[str]) -> None:
        """As `check`, and all tensors have to be whole, and the required ones there.

        Args:
            required: names that have to be among them.
        """
        for name, count in self._num_staged.items():
            if count != self._destinations[name][0].numel():
                self._problems.setdefault(name, f"only a part of {name} came")
        for name in sorted(required):
            if name not in self._num_staged:
                self._problems.setdefault(name, f"{name} is missing")
        self.check()

    def copy_into_place(self) -> list[str]:
        """Overwrite the model's weights. Returns the names, sorted."""
        self._model.weights_changed(self._num_staged)
        with torch.no_grad():
            for name in self._num_staged:
                for view in self._destinations[name]:
                    view.copy_(self._staged(name).view(view.shape))
        return sorted(self._num_staged)

    def _copy(self, name: str, begin: int, piece: Tensor) -> str | None:
        end = begin + len(piece)
        if begin not in (0, self._num_staged.get(name, 0)):
            return f"the parts of {name} came out of order"
        staged = self._staged(name)
        if end > len(staged):
            return f"{name} has more values than its shape says"
        part = staged[begin:end]
        part.copy_(piece)
        self._num_staged[name] = end
        return None if is_finite(part) else not_finite(name)

    def _staged(self, name: str) -> Tensor:
        view, begin = self._destinations[name][0], self._offsets[name]
        return self._memory[begin : begin + _num_bytes(view)].view(view.dtype)


def _num_bytes(view: Matrix) -> int:
    """Of its values, whatever the model keeps of them."""
    return view.numel() * view.dtype.itemsize
