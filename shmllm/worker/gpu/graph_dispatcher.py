"""Which graphs are captured, and which of them a step is run with. Pure Python, without torch.

Owns the sizes and the choice for a step: `GraphDispatcher` is the only one who decides
it. Must not know what a graph is or what lies in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shmllm.config.graphs import CudaGraphMode
from shmllm.errors import EngineStartError

FINE_SIZES_UP_TO = 256
LARGEST_MIXED_SIZE = 512


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The sizes that a step is computed at.

    Attributes:
        num_tokens: padding included.
        num_reqs: requests, padding included; as many rows get logits.
        uniform: each request has one token: a decode.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool


class GraphDispatcher:
    """
    Args:
        mode: what the engine was started with.
        capture_sizes: numbers of tokens, in any order; None: as `default_sizes` says. Those of
            more tokens than a step has are left out.
        max_num_seqs: requests of a step.
        max_num_tokens: of a step.
        max_capture_size: the largest of the default sizes.

    Raises:
        EngineStartError: the sizes are too large for every step.
    """

    def __init__(
        self,
        mode: CudaGraphMode,
        capture_sizes: Sequence[int] | None,
        max_num_seqs: int,
        max_num_tokens: int,
        max_capture_size: int | None = None,
    ) -> None:
        self.mode = mode
        self._max_num_seqs = max_num_seqs
        mixed = mode.mixed_mode
        if capture_sizes is None:
            limits = max_num_seqs, max_num_tokens, max_capture_size
            decode_sizes, mixed_sizes = default_sizes(mixed, *limits)
        else:
            sizes = sorted(set(capture_sizes))
            mixed_sizes = [size for size in sizes if size <= max_num_tokens]
            decode_sizes = [size for size in mixed_sizes if size <= max_num_seqs]
        is_for_all = mixed is CudaGraphMode.FULL
        has_decodes = mode.decode_mode is CudaGraphMode.FULL and not is_for_all
        self._decode_sizes = tuple(decode_sizes) if has_decodes else ()
        self._mixed_sizes = tuple(mixed_sizes) if mixed is not CudaGraphMode.NONE else ()
        if mode is not CudaGraphMode.NONE and not self.captures():
            raise EngineStartError(
                f"no step can use a graph of cudagraph_capture_sizes {capture_sizes}: {mode.name} "
                f"with max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_tokens}; "
                "give smaller sizes, or enforce_eager"
            )

    def captures(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """What to capture, largest first: smaller ones then find the memory of larger ones free.
        That of PIECEWISE serves any number of requests."""
        mixed = [
            (self.mode.mixed_mode, self._captured(size, uniform=False))
            for size in self._mixed_sizes
        ]
        decodes = [
            (CudaGraphMode.FULL, self._captured(size, uniform=True)) for size in self._decode_sizes
        ]
        return sorted(mixed + decodes, key=lambda capture: capture[1].num_tokens, reverse=True)

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: bool,
        *,
        allows_full: bool = True,
        allows_graphs: bool = True,
    ) -> tuple[CudaGraphMode, BatchDescriptor]:
        """What to run a step with: FULL, else PIECEWISE, else NONE; in the smallest graph that
        holds it.

        Args:
            num_tokens: of the step.
            num_reqs: of the step, 1 to num_tokens.
            uniform: each of its requests has one token.
            allows_full: nothing in it forbids to capture its attention.
            allows_graphs: nothing in it forbids graphs at all.

        Returns:
            NONE with the sizes as they are; PIECEWISE with tokens padded; FULL with one of the
            descriptors of `captures`.
        """
        exact = BatchDescriptor(num_tokens, num_reqs, uniform)
        if not allows_graphs:
            return CudaGraphMode.NONE, exact
        if allows_full and uniform:
            size = _next_size(self._decode_sizes, num_tokens)
            if size is not None:
                return CudaGraphMode.FULL, self._captured(size, uniform=True)
        mixed = self.mode.mixed_mode
        size = _next_size(self._mixed_sizes, num_tokens)
        if size is None or (mixed is CudaGraphMode.FULL and not allows_full):
            return CudaGraphMode.NONE, exact
        if mixed is CudaGraphMode.FULL:
            return mixed, self._captured(size, uniform=False)
        return mixed, BatchDescriptor(size, num_reqs, uniform)

    def _captured(self, size: int, uniform: bool) -> BatchDescriptor:
        return BatchDescriptor(size, min(size, self._max_num_seqs), uniform)


def default_sizes(
    mixed_mode: CudaGraphMode,
    max_num_seqs: int,
    max_num_tokens: int,
    max_capture_size: int | None = None,
) -> tuple[list[int], list[int]]:
    """Sizes for graphs of decodes, and for those of other steps.

    Decodes: 1, 2, 4, 8, then steps of 8 to 256, then steps of 16, and the most there can be.
    Others: powers of two to 512, since a piecewise one is a graph for each layer; where they
    are FULL, those of decodes too. A maximum stands for the 512, and bounds decodes as well.
    """
    most_decodes = min(max_num_seqs, max_num_tokens, max_capture_size or max_num_seqs)
    fine = [1, 2, 4, *range(8, FINE_SIZES_UP_TO, 8)]
    fine += range(FINE_SIZES_UP_TO, most_decodes, 16)
    decode_sizes = _up_to(most_decodes, fine)
    most = min(max_capture_size or LARGEST_MIXED_SIZE, max_num_tokens)
    mixed_sizes = _up_to(most, [2**power for power in range(most.bit_length())])
    if mixed_mode is CudaGraphMode.FULL:
        mixed_sizes = sorted({*mixed_sizes, *decode_sizes})
    return decode_sizes, mixed_sizes


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


def _next_size(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest that holds as many tokens."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
