"""What hides padding, the future, and what lies before a sliding window.

Owns additive masks. Knows positions, and neither keys nor requests.
"""

from __future__ import annotations

import torch

from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray
from shmllm.worker.attention_groups import Group


class MaskMaker:
    """
    Args:
        config: windows and heads.
        dtype: of the masks.
        always: make masks that hide nothing, too.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, always: bool = False) -> None:
        self._always = always
        self._windows = set(config.layer_windows)
        self._num_kv_heads = config.num_kv_heads
        self._heads_per_kv = config.num_heads // config.num_kv_heads
        self._dtype = dtype

    def __call__(self, group: Group, contexts: LongArray) -> dict[int | None, torch.Tensor | None]:
        """For each window (1 or G * kv heads, 1, Q * heads per kv head, context), additive;
        None where every query sees everything, unless there always is a mask.

        Args:
            group: has seen `contexts`.
            contexts: (N,) of each member.
        """
        may_see_all = group.query_len == 1 and not self._always
        if may_see_all and self._windows == {None} and contexts.min() == group.context:
            return {None: None}
        positions = group.positions(contexts)
        sees_all = may_see_all and int(positions.min()) == group.context - 1
        query, key = torch.from_numpy(positions)[:, :, None], torch.arange(group.context)
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self._windows:
            if sees_all and (window is None or window >= group.context):
                masks[window] = None
                continue
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype)
            masks[window] = self._spread(mask.masked_fill_(hidden, -torch.inf))
        return masks

    def _spread(self, mask: torch.Tensor) -> torch.Tensor:
        """(1 or G, Q, context) -> as the attention call takes it."""
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(self._heads_per_kv, dim=1)
        if mask.shape[0] > 1:
            mask = mask.repeat_interleave(self._num_kv_heads, dim=0)
        return mask[:, None]
