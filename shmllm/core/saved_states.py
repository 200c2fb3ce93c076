"""Copies of the recurrent states from which steps with drafted tokens begin.

Keys and values behind a wrong draft are written again, but a state is one block that every token
changes. So a step with drafts begins with a copy of the state. If a draft is wrong, the request
goes back to where the step began, and its next step begins by copying the state back. That step
computes the accepted tokens once more, which costs little beside reading the weights.

This module must not know what a state is, nor who copies it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.core.block_pool import KVBlock
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request


@dataclass(slots=True)
class SavedState:
    """The copy of a request's state.

    Attributes:
        blocks: have the copy, one for each group of states.
        num_tokens: how many tokens the state has passed; 0: there is no copy yet.
        is_wanted: whether the request's next step begins from the copy.
    """

    blocks: list[KVBlock]
    num_tokens: int = 0
    is_wanted: bool = False


class SavedStates:
    """
    Args:
        kv_cache: has the blocks of states.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    def reserve(self, request: Request) -> bool:
        """Make sure that a request has a block for a copy. Returns False if none can be spared."""
        if request.saved_state is None:
            blocks = self._kv_cache.spare_states()
            request.saved_state = SavedState(blocks) if blocks else None
        return request.saved_state is not None

    def plan(self, request: Request, plan: StepPlan, has_drafts: bool) -> None:
        """Plan the copies before a step that begins at the request's `num_computed_tokens`."""
        saved = request.saved_state
        if saved is None:
            return
        own = [block.block_id for block in self._kv_cache.state_blocks(request)]
        copies = [block.block_id for block in saved.blocks]
        if saved.is_wanted:
            plan.state_copies += zip(copies, own, strict=True)
            saved.is_wanted = False
        elif has_drafts:
            plan.state_copies += zip(own, copies, strict=True)
            saved.num_tokens = request.num_computed_tokens

    def go_back(self, request: Request) -> None:
        """Let the request go on from the copy."""
        saved = request.saved_state
        assert saved is not None, "steps with drafts begin with a copy"
        request.num_computed_tokens = saved.num_tokens
        saved.is_wanted = True

    def release(self, request: Request) -> None:
        """Free the block of a request that leaves its row."""
        if request.saved_state is not None:
            for block in request.saved_state.blocks:
                self._kv_cache.states.discard(block)
            request.saved_state = None
