"""The phases of a request in a pool whose engines have roles.

An engine of the role "prefill" computes long prompts into the cache that the engines share. An
engine that decodes finds their blocks there, so no long prompt stalls its steps. This module
decides which requests do that, and which engines a phase has. It must not know where requests are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from shmllm.client.routing import SentBlocks
from shmllm.config.shared_kv import Role
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

LONG_BLOCKS = 4
"""A prompt is long if more tokens of it than so many blocks have are in no cache. That is 64 tokens
with blocks of 16: they lengthen a decode step of an 8B model on a GPU (5 ms, and 27 us a token) by
a third, and to hand a request over costs another step."""

FIRST_PREFILL = 2**48
"""What is added to a request's number for its prefill, whose rows nobody sees. Numbers of requests
stay below it, and the sum is exact in JSON."""

PREFILL = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class Phase(Enum):
    """What an engine does with a request.

    NEW: nothing yet; the phase is decided when an engine is chosen.
    PREFILL: computes the prompt into the shared cache. Nobody sees the token that comes with it.
    WAIT: nothing: most of the prompt is being computed for another request.
    PROMPT: all of a request that is little but a prompt.
    DECODE: all of a request, whose prompt is short or in the shared cache.
    """

    NEW = auto()
    PREFILL = auto()
    WAIT = auto()
    PROMPT = auto()
    DECODE = auto()


def prefill_of(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request that computes the prompt of another one, and ends with its first token."""
    return replace(
        request,
        number=request.number + FIRST_PREFILL,
        params=PREFILL,
        bad_words=(),
        grammar="",
        thinking=None,
        extra_args="",
    )


class Phases:
    """
    Args:
        roles: the role of each engine.
        num_blocks: the number of blocks in the shared cache.
        block_size: the number of tokens in a block.
    """

    def __init__(self, roles: Sequence[Role], num_blocks: int, block_size: int) -> None:
        self._prefills = frozenset(k for k, role in enumerate(roles) if role == "prefill")
        self._block_size = block_size
        self._shared = SentBlocks(num_blocks if self._prefills else 0)
        self._under_way: dict[int, int] = {}

    @property
    def has_prefills(self) -> bool:
        """Whether an engine computes prompts for others."""
        return bool(self._prefills)

    def engines(self, phase: Phase, running: Sequence[int]) -> Sequence[int]:
        """The engines for a phase. Without an engine of the right role, any one serves requests,
        and none computes prompts for others.

        Args:
            phase: the phase.
            running: the indexes of the engines to choose from.
        """
        if not self._prefills:
            return running
        prefills = [engine for engine in running if engine in self._prefills]
        if phase is Phase.PREFILL:
            return prefills
        if phase is Phase.PROMPT:
            return prefills or running
        return [engine for engine in running if engine not in self._prefills] or running

    def decide(
        self, request: EngineCoreRequest, chain: Sequence[int], running: Sequence[int]
    ) -> tuple[Phase, int]:
        """Decide the first phase of a request.

        Args:
            request: the request.
            chain: the `chain_hashes` of its prompt; empty if it reads no cached blocks.
            running: the indexes of the engines that take it.

        Returns:
            The phase, and for WAIT the number of the request to wait for.
        """
        num_prefills = len(self.engines(Phase.PREFILL, running)) if self._prefills else 0
        if not 0 < num_prefills < len(running):
            return Phase.DECODE, -1
        if isinstance(request.params, Pooling):
            return Phase.PROMPT, -1
        # With so many blocks in the shared cache, the rest is short.
        decisive = -(-len(request.computed_token_ids) // self._block_size) - LONG_BLOCKS
        if decisive <= 0 or self._shared.num_hits(chain, min(decisive, len(chain))) == decisive:
            return Phase.DECODE, -1
        if request.params.max_tokens == 1:
            return Phase.PROMPT, -1
        if not chain:
            return Phase.DECODE, -1
        leader = self._under_way.get(chain[decisive - 1])
        return (Phase.PREFILL, -1) if leader is None else (Phase.WAIT, leader)

    def begun(self, number: int, chain: Sequence[int]) -> None:
        """The prefill of a request begins."""
        for each in chain:
            self._under_way.setdefault(each, number)

    def ended(self, number: int, chain: Sequence[int]) -> None:
        """The prefill of a request has ended, whatever the reason. Idempotent."""
        for each in chain:
            if self._under_way.get(each) == number:
                del self._under_way[each]

    def share(self, chain: Sequence[int]) -> None:
        """A prompt was computed, so its blocks are in the shared cache."""
        if self._prefills:
            self._shared.add(chain)

    def num_shared(self, chain: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt are in the shared cache."""
        return self._shared.num_hits(chain, len(chain))

    def clear(self) -> None:
        """Forget all prompts, because the engines have."""
        self._shared.clear()
