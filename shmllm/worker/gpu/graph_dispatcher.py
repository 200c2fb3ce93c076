"""Decides which CUDA graphs are captured, and which graph a step uses. Pure Python, without torch.

This module owns the captured sizes and the choice for each step; no other module decides these. It
must not know how a graph is captured or what it contains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode

FINE_SIZES_UP_TO = 256
LARGEST_MIXED_SIZE = 512


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The padded sizes of a step.

    Attributes:
        num_tokens: the number of tokens, with padding.
        num_reqs: the number of requests, with padding.
        uniform: whether each request has one token: a decode step.
        num_drafts: the number of drafted tokens, with padding.
        max_verified: the most tokens that a request may have in a step that has one token for each
            request and drafts; 0: the step is another one, or requests may have any number.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool
    num_drafts: int = 0
    max_verified: int = 0

    @property
    def num_samples(self) -> int:
        """The number of rows that get logits, with padding: one for each request, and one for each
        drafted token."""
        return self.num_reqs + self.num_drafts


class GraphDispatcher:
    """Chooses the graph mode and the padded sizes of each step.

    Args:
        mode: the engine's cudagraph_mode.
        capture_sizes: numbers of tokens, in any order; None for those of `default_sizes`. Sizes
            larger than max_num_tokens are ignored.
        max_num_seqs: the largest number of requests in a step.
        max_num_tokens: the largest number of tokens in a step.
        max_capture_size: the largest of the default sizes.
        max_drafts: the largest number of drafted tokens in a step.
        max_verified: the descriptors' number of this name for steps that verify drafts. A PIECEWISE
            graph serves all steps of its size, so those that it serves have 0.
    """

    def __init__(
        self,
        mode: CudaGraphMode,
        capture_sizes: Sequence[int] | None,
        max_num_seqs: int,
        max_num_tokens: int,
        max_capture_size: int | None = None,
        max_drafts: int = 0,
        max_verified: int = 0,
    ) -> None:
        self.mode = mode
        self._max_verified = max_verified
        self._max_num_seqs = max_num_seqs
        self._max_drafts = max_drafts
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
        most_verified = max_num_seqs + max_drafts if has_decodes and max_drafts else 0
        self._verify_sizes = tuple(size for size in mixed_sizes if 1 < size <= most_verified)
        self._mixed_sizes = tuple(mixed_sizes) if mixed is not CudaGraphMode.NONE else ()

    @property
    def has_piecewise_decodes(self) -> bool:
        """Whether a step of decodes may be replayed PIECEWISE."""
        if self.mode.mixed_mode is not CudaGraphMode.PIECEWISE:
            return False
        most = min(self._max_num_seqs, max(self._mixed_sizes, default=0))
        return max(self._decode_sizes, default=0) < most

    def captures(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """Return the graphs to capture, the largest first, so that smaller graphs reuse the memory
        of larger ones. A PIECEWISE graph serves any number of requests."""
        mixed = [
            (self.mode.mixed_mode, self._captured(size, uniform=False))
            for size in self._mixed_sizes
        ]
        decodes = [
            (CudaGraphMode.FULL, self._captured(size, uniform=True)) for size in self._decode_sizes
        ]
        verifying = [
            (CudaGraphMode.FULL, self._captured(size, uniform=False, verifies=True))
            for size in self._verify_sizes
        ]
        captures = mixed + decodes + verifying
        return sorted(captures, key=lambda capture: capture[1].num_tokens, reverse=True)

    def sampled_captures(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """Return a FULL one of the captures for each number of rows, with padding, whose logits
        they compute."""
        captures = [each for each in self.captures() if each[0] is CudaGraphMode.FULL]
        return list({each[1].num_samples: each for each in captures}.values())

    def dispatch(
        self, num_tokens: int, num_reqs: int, uniform: bool, num_drafts: int = 0
    ) -> tuple[CudaGraphMode, BatchDescriptor]:
        """Choose the mode of a step: FULL if possible, else PIECEWISE, else NONE; and the smallest
        graph that the step fits into.

        Args:
            num_tokens: the number of the step's tokens.
            num_reqs: the number of the step's requests, from 1 to num_tokens.
            uniform: whether each request has one token.
            num_drafts: the number of the step's drafted tokens. A step that has, besides these, one
                token for each request verifies drafts, and has graphs as decodes have. Its requests
                have at most `max_verified` tokens, if that is not 0.

        Returns:
            NONE with the step's own sizes, PIECEWISE with the number of tokens padded, or FULL with
            one of the descriptors of `captures`.
        """
        verifies = not uniform and num_tokens == num_reqs + num_drafts
        sizes = self._decode_sizes if uniform else self._verify_sizes if verifies else ()
        size = _next_size(sizes, num_tokens)
        if size is not None:
            return CudaGraphMode.FULL, self._captured(size, uniform, verifies)
        mixed = self.mode.mixed_mode
        size = _next_size(self._mixed_sizes, num_tokens)
        if size is None:
            most = self._max_verified if verifies else 0
            own = BatchDescriptor(num_tokens, num_reqs, uniform, num_drafts, most)
            return CudaGraphMode.NONE, own
        if mixed is CudaGraphMode.FULL:
            return mixed, self._captured(size, uniform=False)
        return mixed, BatchDescriptor(size, num_reqs, uniform, num_drafts)

    def _captured(self, size: int, uniform: bool, verifies: bool = False) -> BatchDescriptor:
        num_reqs = min(size, self._max_num_seqs)
        num_drafts = 0 if uniform else min(size - num_reqs, self._max_drafts)
        most = self._max_verified if verifies else 0
        return BatchDescriptor(size, num_reqs, uniform, num_drafts, most)


class DraftDispatcher:
    """Chooses the graphs of steps whose graphs are those of decodes: they replay graphs if decodes
    of the large model do.

    Args:
        config: the engine's configuration.
        max_requests: the largest number of requests in a step.
        most_further: the most tokens that a step with a graph may have besides one for each
            request.
        max_verified: the most tokens that a request may have in such a step; 0: any number.

    Attributes:
        most_further: as given.
        graphs: the choice.
    """

    def __init__(
        self, config: EngineConfig, max_requests: int, most_further: int, max_verified: int = 0
    ) -> None:
        self.most_further = most_further
        self._max_verified = max_verified
        graphs, mode = config.graphs, CudaGraphMode.NONE
        if graphs.effective_mode.decode_mode is CudaGraphMode.FULL:
            mode = CudaGraphMode.FULL_DECODE_ONLY
        self.graphs = GraphDispatcher(
            mode,
            graphs.capture_sizes,
            max_requests,
            config.scheduler.max_num_batched_tokens,
            graphs.max_capture_size,
            max_drafts=most_further,
            max_verified=max_verified,
        )

    def dispatch(
        self, num_tokens: int, num_requests: int, max_query_len: int
    ) -> tuple[CudaGraphMode, BatchDescriptor]:
        """Choose the mode and the padded sizes of a step; see `GraphDispatcher.dispatch`. Logits of
        further tokens, which nobody needs, are computed by graphs only.

        Args:
            num_tokens: the number of the step's tokens.
            num_requests: the number of the step's requests.
            max_query_len: the largest number of tokens of a request.
        """
        further = num_tokens - num_requests
        are_few = max_query_len <= self._max_verified or not self._max_verified
        num_drafts = further if further <= self.most_further and are_few else 0
        mode, descriptor = self.graphs.dispatch(num_tokens, num_requests, not further, num_drafts)
        if mode is CudaGraphMode.NONE:
            descriptor = replace(descriptor, num_drafts=0)
        return mode, descriptor


def default_sizes(
    mixed_mode: CudaGraphMode,
    max_num_seqs: int,
    max_num_tokens: int,
    max_capture_size: int | None = None,
) -> tuple[list[int], list[int]]:
    """Return the default capture sizes of decode steps, and those of other steps.

    The sizes of decode steps are 1, 2, 4, 8, then multiples of 8 up to 256, then multiples of 16,
    and the largest possible number of decodes. The sizes of other steps are powers of two up to
    512: they are few, since a piecewise graph has one graph for each layer. If other steps use FULL
    graphs, they have the sizes of decode steps, too. max_capture_size replaces the 512, and limits
    the sizes of decode steps.
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
    """Return the smallest size that is not smaller than `wanted`."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
