"""What a model that drafts from the hidden states of another one reads of them.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from shmllm.models.weight_names import LM_HEAD, TABLE

MOST_LEVELS = 16
"""The most hidden states of a token that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """What such a model consists of beside its layers, of whatever kind.

    Attributes:
        source_width: the width of the other model's hidden states.
        levels: behind how many of the other model's layers each of them is the residual stream;
            None: those that `levels_of` returns; empty: there is one, that behind the final norm.
        num_drafted: the number of token ids that can be drafted: the rows of the LM head.
        mask_token: the token that stands for tokens that are not known; None: each draft reads the
            one before.
        has_table: whether the checkpoint has a table of embeddings of its own; else it is that of
            the other model.
        has_head: the same of the LM head.
        has_bias: whether the projection of what is read has a bias.
    """

    source_width: int
    levels: tuple[int, ...] | None
    num_drafted: int
    mask_token: int | None = None
    has_table: bool = True
    has_head: bool = True
    has_bias: bool = False

    def with_tensors(self, names: Collection[str], vocab_size: int) -> Self:
        """Returns the spec of a checkpoint with tensors of these names, as the default names are.
        An LM head of fewer tokens than the vocabulary has must be there."""
        return replace(
            self,
            has_table=TABLE in names,
            has_head=LM_HEAD in names or self.num_drafted < vocab_size,
            has_bias="fc.bias" in names,
        )

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it takes from the other model, in words."""
        parts = {"embeddings": self.has_table, "LM head": self.has_head}
        return tuple(name for name, is_there in parts.items() if not is_there)

    @property
    def most_drafted(self) -> int | None:
        """The largest number of tokens that it drafts; None: any."""
        return None

    @property
    def usual_drafted(self) -> int | None:
        """The number of tokens that it was trained to draft; None: it does not say."""
        return self.most_drafted

    @property
    def method(self) -> str:
        """vLLM's name of the method."""
        raise NotImplementedError

    @property
    def num_levels(self) -> int:
        """How many residual streams of a token are read."""
        return 3 if self.levels is None else len(self.levels)

    def levels_of(self, num_layers: int) -> tuple[int, ...]:
        """Returns the levels in a model of so many layers: by default near its beginning, its
        middle and its end, as in SafeAILab's and vLLM's code."""
        return (2, num_layers // 2, num_layers - 3) if self.levels is None else self.levels


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec(DraftSpec):
    """A model of EAGLE.

    In EAGLE 1 and 2 a projection of the embedding of the next token and the hidden state behind the
    other model's final norm, side by side, begins the residual stream (Li et al., "EAGLE", 2024,
    section 4.1). In EAGLE-3 a projection makes one hidden state of several of the other model's,
    and the first layer's attention reads the normalised embedding and the normalised hidden state,
    side by side (Li et al., "EAGLE-3", 2025, section 3). For a further token the model's own result
    takes the place of the hidden state.

    In P-EAGLE further tokens do not wait for each other ("P-EAGLE: Parallel-Drafting EAGLE", 2026):
    one token stands for all that are not known, with hidden states that the checkpoint has.

    Attributes:
        is_projected: whether a projection joins embedding and hidden state, and not the first
            layer's attention.
        norms_sources: whether the states have a norm before the projection, over all of them.
        norms_levels: whether each of them has one, behind that.
        norms_stream: whether the normalised hidden state begins the residual stream, and not the
            hidden state itself.
        feeds_normed: whether the result is behind the final norm.
    """

    is_projected: bool = False
    norms_sources: bool = False
    norms_levels: bool = False
    norms_stream: bool = False
    feeds_normed: bool = False

    @property
    def method(self) -> str:
        return "eagle" if self.is_projected else "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(DraftSpec):
    """A model that drafts a block of tokens at once ("DFlash: Block Diffusion for Flash Speculative
    Decoding", 2026).

    A projection makes one hidden state of several of the other model's. Each layer's keys and
    values of the tokens that the other model has computed are projections of its norm. The model
    reads the last known token and one that stands for each of those behind it; all of them attend
    to each other. The result for such a token predicts the token in its own place.

    Attributes:
        block_size: the tokens of a block in training, the known one included; None: it is not
            known.
    """

    block_size: int | None = None

    @property
    def usual_drafted(self) -> int | None:
        return None if self.block_size is None else max(self.block_size - 1, 1)

    @property
    def method(self) -> str:
        return "dflash"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec(DraftSpec):
    """Heads that each predict a token from the hidden state behind the other model's final norm
    (Cai et al., "Medusa", 2024, section 2.1). A head consists of residual blocks, each of which
    adds the SiLU of a projection, and an LM head. Embeddings are none.

    Attributes:
        num_heads: the number of heads: the most tokens that are drafted.
        num_blocks: the number of residual blocks of each head.
        shares_head: whether all of them have one LM head.
    """

    num_heads: int
    num_blocks: int
    shares_head: bool = False

    def with_tensors(self, names: Collection[str], vocab_size: int) -> Self:
        return self

    @property
    def lacks(self) -> tuple[str, ...]:
        return ()

    @property
    def most_drafted(self) -> int | None:
        return self.num_heads

    @property
    def method(self) -> str:
        return "medusa"
