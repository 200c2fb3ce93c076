"""What a model that drafts from the hidden states of another one reads of them.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_LEVELS = 16
"""The most hidden states of a token that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """What such a model consists of beside its layers (Li et al., "EAGLE-3", 2025, section 3).

    A projection makes one hidden state of several of the other model's. The first layer's attention
    reads the normalised embedding of the next token and the normalised hidden state, side by side.
    For a further token the model's own result takes the place of the projection's.

    Attributes:
        source_width: the width of the other model's hidden states.
        levels: behind how many of the other model's layers each of them is the residual stream;
            None: those that `levels_of` returns.
        num_drafted: the number of token ids that can be drafted: the rows of the LM head.
        norms_sources: whether the states have a norm before the projection, over all of them.
        norms_stream: whether the normalised hidden state begins the residual stream, and not the
            hidden state itself.
        feeds_normed: whether the result is behind the final norm.
        has_table: whether the checkpoint has a table of embeddings of its own; else it is that of
            the other model.
    """

    source_width: int
    levels: tuple[int, ...] | None
    num_drafted: int
    norms_sources: bool = False
    norms_stream: bool = False
    feeds_normed: bool = False
    has_table: bool = True

    @property
    def num_levels(self) -> int:
        """How many hidden states of a token are read."""
        return 3 if self.levels is None else len(self.levels)

    def levels_of(self, num_layers: int) -> tuple[int, ...]:
        """Returns the levels in a model of so many layers: by default near its beginning, its
        middle and its end, as in SafeAILab's and vLLM's code."""
        return (2, num_layers // 2, num_layers - 3) if self.levels is None else self.levels
