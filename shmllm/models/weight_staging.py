"""Collects the new weights of an update until all have arrived and were checked.

This module owns the places where new weights wait, and the list of problems of the staged tensors.
It must not know who sends them. A weight waits in the first of these places that is possible:

    place                   if                                          the update then
    where it belongs        its value is missing since a sleep,         does not copy it again
                            so there is nothing to preserve
    memory of the GPU       the pieces are on the model's GPU, and      copies it within the GPU
                            SPARE_BYTES stay free
    memory of the host      else                                        copies it to the model

The expected time for 16 GB of bfloat16 in 291 tensors (8B) on an H100 (copies reach 2.6 TB/s, bytes
read and written counted; H200: 4.3), where the front end packs 64 buckets of 256 MiB on the same
GPU, with C = 32 GB / 2.6 TB/s = 12 ms for a copy and 6 ms for a pass that only reads:

    pack (C), copy to the place (C), check that values are finite (6 ms)              31 ms
    355 pieces: two launches and two waits of the host, 30 us in all                  11 ms
        on the front end's side, and 60 us on the engine's                            21 ms
    64 calls of 0.3 ms, and two changes of the process on the GPU, 0.2 ms each        45 ms
    missing weights: all of the above                                                0.11 s
    memory of the GPU: one more copy, and cudaMalloc and cudaFree of 16 GB         + 0.1 s
    memory of the host: not pinned, 16 GB each way at 6 to 10 GB/s               + 3.2 to 5.4 s

The host's memory is private and anonymous, and in huge pages if the system provides them: the first
write of 540 MB then takes as long as a copy. In a memfd, which has small pages, it took five times
as long. It is not pinned: to pin 16 GB takes seconds by itself, unless the memory is kept for ever.
The address range is reserved for all weights; only written pages take memory.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.layers import NamedWeights
from shmllm.models.matrices import Destination
from shmllm.models.model import Model
from shmllm.models.weight_update import find_problem, find_problem_of_values, refuse

ALIGNMENT_BYTES = 64
SPARE_BYTES = 2**30
"""The memory of a GPU that staging leaves free for steps and for other processes."""


def free_bytes(device: torch.device) -> int:
    """The free memory of a GPU; 0 for a CPU, where weights wait in `HostMemory`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class HostMemory:
    """Host memory for each weight of a model.

    Args:
        weights: the weights.

    Raises:
        RequestError: the memory for all weights cannot be reserved.
    """

    def __init__(self, weights: NamedWeights) -> None:
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (view, *_) in weights.items():
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

    def place(self, name: str, view: Destination) -> Tensor:
        """Returns the memory of a weight, [elements] in the weight's dtype."""
        begin = self._offsets[name]
        return self._memory[begin : begin + _num_bytes(view)].view(view.dtype)


class StagedWeights:
    """The staged tensors of one weight update.

    Args:
        model: the model that gets the weights. Until `copy_into_place`, only weights that are
            missing change, and they stay missing.
        free: returns the free memory of a device, see `free_bytes`.
    """

    def __init__(self, model: Model, free: Callable[[torch.device], int] = free_bytes) -> None:
        self._model = model
        self._free = free
        self._destinations = model.destinations()
        self._host: HostMemory | None = None
        self._places: dict[str, Tensor] = {}
        self._in_place: dict[str, int] = {}
        self._uses_gpu = False
        self._num_staged: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    def put(self, name: str, shape: Sequence[int], begin: int, piece: Tensor) -> None:
        """Stages a piece of a tensor. A problem with it is recorded, and `check` raises it.

        Args:
            name: the tensor's name in a Hugging Face checkpoint.
            shape: the shape of the whole tensor.
            begin: the index, in the flattened tensor, of the piece's first element. A tensor's
                pieces must come in order; a piece with index 0 starts the tensor again.
            piece: [elements]; it is copied and converted to the model's dtype.
        """
        known = self._model.destination_name(name, shape)
        if known is None or known in self._problems:
            return
        name = known
        problem = find_problem(self._destinations, name, shape, piece.dtype)
        if problem is None:
            try:
                problem = self._copy(name, begin, piece)
            except RequestError as refusal:
                problem = str(refusal)
        if problem is not None:
            self._problems[name] = problem

    @property
    def uses_host(self) -> bool:
        """Whether a weight waits in the host's memory."""
        return self._host is not None

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
            elif self._was_touched(name):
                self._problems.setdefault(name, _touched(name))
        for name in sorted(set(required) - self._model.written(self._num_staged)):
            self._problems.setdefault(name, f"{name} is missing")
        self.check()

    def copy_into_place(self) -> list[str]:
        """Overwrites the model's weights with the staged ones. Returns their names, sorted."""
        waiting = [
            (name, self._places[name].view(self._destinations[name][0].shape))
            for name in self._num_staged
            if name not in self._in_place
        ]
        self._model.write(waiting, self._num_staged.keys() & self._in_place.keys())
        return sorted(self._num_staged)

    def close(self) -> None:
        """Frees the memory."""
        self._host = None
        self._places.clear()
        if self._uses_gpu:
            torch.cuda.empty_cache()  # torch would keep it from the KV cache and other processes

    def _copy(self, name: str, begin: int, piece: Tensor) -> str | None:
        end = begin + len(piece)
        if begin not in (0, self._num_staged.get(name, 0)):
            return f"the parts of {name} arrived out of order"
        if name not in self._places:
            self._places[name] = self._place(name, piece.device)
        values = self._places[name]
        if end > len(values):
            return f"{name} has more values than its shape says"
        if self._was_touched(name):
            return _touched(name)
        part = values[begin:end]
        with one_thread_less():
            part.copy_(piece)
            self._num_staged[name] = end
            return find_problem_of_values(name, part)

    def _place(self, name: str, device: torch.device) -> Tensor:
        """Returns the memory in which a weight waits, [elements] in the weight's dtype."""
        views = self._destinations[name]
        view = views[0]
        is_alone = len(views) == 1 and self._model.followers is None
        is_alone &= self._is_missing(name)
        if is_alone and isinstance(view, Tensor) and view.is_contiguous():
            self._in_place[name] = self._model.num_losses
            return view.view(-1)
        if device == view.device and self._free(device) >= _num_bytes(view) + SPARE_BYTES:
            with contextlib.suppress(torch.OutOfMemoryError):
                place = torch.empty(view.numel(), dtype=view.dtype, device=device)
                self._uses_gpu = True
                return place
        if self._host is None:
            self._host = HostMemory(self._destinations)
        return self._host.place(name, view)

    def _is_missing(self, name: str) -> bool:
        return self._model.written([name]) <= self._model.missing

    def _was_touched(self, name: str) -> bool:
        """Whether a weight that waits where it belongs was written by another call meanwhile, has
        lost its memory, or is asleep: it must not be written then."""
        model = self._model
        return name in self._in_place and (
            model.is_asleep
            or not self._is_missing(name)
            or model.num_losses != self._in_place[name]
        )


@contextlib.contextmanager
def one_thread_less() -> Iterator[None]:
    """Lets torch use one thread less, as long as one is left.

    While a piece is staged, the front end fills the next bucket and needs a core. With a thread on
    each core, every copy would wait until the system lets the last of its threads run.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(num_threads - 1, 1))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _num_bytes(view: Destination) -> int:
    """Returns the size of a weight's values in its dtype, even if the model keeps them rounded."""
    return view.numel() * view.dtype.itemsize


def _touched(name: str) -> str:
    return f"{name} was written or put to sleep by another call during the update"
