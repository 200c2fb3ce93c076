"""A model that drafts from the hidden states of another one: what all kinds of them share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel, Rename
from shmllm.models.draft_specs import DraftSpec
from shmllm.models.layers import NamedWeights, Norm, Storage
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.weight_names import LM_HEAD, TABLE


class DraftingModel(DecoderModel):
    """See `DraftSpec`.

    Args:
        config: the configuration, with a `DraftSpec`.
        storage: allocates the weights.
        renames: those of `DecoderModel`.

    Attributes:
        offsets: [drafted ids] int64, by how much each is smaller than the token id that it stands
            for, or None: these are the same.
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        assert config.drafting is not None, "the model drafts from hidden states"
        self._drafting: DraftSpec = config.drafting
        self._lender: DecoderModel | None = None
        self.offsets: Tensor | None = None
        if self._drafting.num_drafted < config.vocab_size:
            self.offsets = storage.allocate((self._drafting.num_drafted,), torch.int64)
            self._own_ids = storage.constant(torch.arange(self._drafting.num_drafted))

    @property
    def mask_token(self) -> int | None:
        """See `DraftSpec.mask_token`."""
        return self._drafting.mask_token

    @property
    def own_norms(self) -> dict[str, Norm]:
        """Its norms beside those of a decoder, by their names."""
        raise NotImplementedError

    def borrow(self, lender: DecoderModel) -> None:
        """Takes the table of embeddings, and the LM head, of the other model if the checkpoint has
        none."""
        if not self._drafting.has_table:
            self.embedding.table = lender.embedding.table
        if not self._drafting.has_head:
            self._lender = lender

    def combine(self, ops: LogitsOps, sources: Tensor) -> Tensor:
        """Makes one hidden state of residual streams of the other model.

        Args:
            ops: the operations of the device, whose product writes to the result of `Ops.given`.
            sources: [tokens, levels * source_width]; may be overwritten.

        Returns:
            [tokens, hidden].
        """
        raise NotImplementedError

    def logits(self, ops: LogitsOps, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, drafted ids], of hidden states, [rows, hidden], which may be
        overwritten."""
        if self._lender is not None:
            return self._lender.logits(ops, hidden)
        return super().logits(ops, hidden)

    def of_tokens(self, logits: Tensor) -> Tensor:
        """Returns the logits, [rows, vocab], of all token ids, from those that `logits` returned;
        those of ids that cannot be drafted are minus infinity."""
        if self.offsets is None:
            return logits
        every = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return every.index_copy_(1, self._own_ids + self.offsets, logits)

    def _default_weights(self) -> NamedWeights:
        weights = super()._default_weights()
        for name, norm in self.own_norms.items():
            weights |= norm.named_weights(name)
        if self.offsets is not None:
            weights["d2t"] = (self.offsets,)
        if not self._drafting.has_table:
            del weights[TABLE]
        if not self._drafting.has_head:
            del weights[LM_HEAD]
        return weights

    def check_weights(self) -> None:
        """See `DecoderModel.check_weights`: no id stands for one outside of the vocabulary."""
        if self.offsets is None:
            return
        token_ids, size = self._own_ids + self.offsets, self.config.vocab_size
        wrong = ((token_ids < 0) | (token_ids >= size)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise ValueError(
                f"d2t has {int(self.offsets[place])} at {place}, which makes it token id "
                f"{place + int(self.offsets[place])}; the vocabulary has {size:,} ids"
            )

    def neutral_weights(self) -> Iterator[tuple[Tensor, float]]:
        """See `DecoderModel.neutral_weights`."""
        yield from super().neutral_weights()
        for norm in self.own_norms.values():
            yield norm.weight, 1.0 - norm.spec.offset
        if self.offsets is not None:
            yield self.offsets, 0
