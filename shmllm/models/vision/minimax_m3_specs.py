"""What the tower of MiniMax M3 is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.squares_specs import RotatedTower


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM3Tower(RotatedTower):
    """All patches of an image attend to one another. Two projections of each patch precede two of
    squares.

    Attributes:
        eps: of the norms.
        projected: the width between two projections.
    """

    eps: float
    projected: int

    @property
    def num_axis_pairs(self) -> int:
        """The number of pairs of elements of a head that rotate by each of three axes: time, rows
        and columns. Those behind them do not rotate."""
        return self.hidden_size // self.num_heads // 3 // 2
