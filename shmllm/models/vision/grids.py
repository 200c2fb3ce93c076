"""The shapes of prepared images."""

from __future__ import annotations

Grid = tuple[int, int, int]
"""The shape of a prepared image. Of any size: (1, rows, columns) in patches. Of tiles: (tiles,
rows, columns), where rows and columns say how they lie, and are 1 if they do not matter; see also
`LlavaNextTower`."""
