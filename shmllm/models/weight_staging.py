"""Collects the new weights of an update in host memory until all have arrived.

This module owns the staging memory and the list of problems of the staged tensors. It must not
know who sends them.

The staging memory is private and anonymous, and in huge pages if the system provides them: the
first write of 540 MB then takes as long as a copy. In a memfd, which has small pages, it took five
times as long. The address range is reserved for all weights; only written pages take memory.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Matrix
from shmllm.models.weight_update import find_problem, is_finite, is_ignored, not_finite, refuse

ALIGNMENT_BYTES = 64


class StagedWeights:
    """The staged tensors of one weight update.

    Args:
        model: the model that gets the weights. It stays unchanged until `copy_into_place`.

    Raises:
        RequestError: the memory for all weights cannot be reserved.
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
        # The mapping is freed with the last tensor that uses it.
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def put(self, name: str, shape: Sequence[int], begin: int, piece: Tensor) -> None:
        """Stages a piece of a tensor. A problem with it is recorded, and `check` raises it.

        Args:
            name: the tensor's name in a Hugging Face checkpoint.
            shape: the shape of the whole tensor.
            begin: the index, in the flattened tensor, of the piece's first element. A tensor's
                pieces must come in order; a piece with index 0 starts the tensor again.
            piece: [elements]; it is copied and converted to the model's dtype.
        """
        tied = self._model.config.tie_word_embeddings
        if is_ignored(name, tied) or name in self._problems:
            return
        problem = find_problem(self._destinations, name, shape, piece.dtype)
        if problem is None:
            problem = self._copy(name, begin, piece)
        if problem is not None:
            self._problems[name] = problem

    def check(self) -> None:
        """Raises RequestError, which names the tensors, if any had problems."""
        refuse(self._problems)

    def check_complete(self, required: Collection[str]) -> None:
        """Raises as `check` does, and also if a tensor is incomplete or a required one is missing.

        Args:
            required: the names of the required tensors.
        """
        for name, count in self._num_staged.items():
            if count != self._destinations[name][0].numel():
                self._problems.setdefault(name, f"only a part of {name} arrived")
        for name in sorted(required):
            if name not in self._num_staged:
                self._problems.setdefault(name, f"{name} is missing")
        self.check()

    def copy_into_place(self) -> list[str]:
        """Overwrites the model's weights with the staged ones. Returns their names, sorted."""
        self._model.weights_changed(self._num_staged)
        with torch.no_grad():
            for name in self._num_staged:
                for view in self._destinations[name]:
                    view.copy_(self._staged(name).view(view.shape))
        return sorted(self._num_staged)

    def _copy(self, name: str, begin: int, piece: Tensor) -> str | None:
        end = begin + len(piece)
        if begin not in (0, self._num_staged.get(name, 0)):
            return f"the parts of {name} arrived out of order"
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
    """Returns the size of a weight's values in its dtype, even if the model keeps them rounded."""
    return view.numel() * view.dtype.itemsize
