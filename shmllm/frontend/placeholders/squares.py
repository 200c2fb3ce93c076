"""What the placeholders share of images of any size: an embedding for each square of patches."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class SquaresPlaceholder(ImagePlaceholder):
    """Attributes:
    patch_size: the side of a patch, in pixels.
    merge_size: the side of the square of patches that becomes one embedding, in patches.
    """

    patch_size: int
    merge_size: int

    def count(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return frames * (rows // self.merge_size) * (columns // self.merge_size)

    def check_rules(self, rules: Rules) -> None:
        super().check_rules(rules)
        assert isinstance(rules, SquaresRules)
        if (rules.patch_size, rules.merge_size) != (self.patch_size, self.merge_size):
            raise Config({}).error(
                f"the vision tower has patches of {self.patch_size} pixels and merges squares of "
                f"{self.merge_size}, the image processor has {rules.patch_size} and "
                f"{rules.merge_size}"
            )
