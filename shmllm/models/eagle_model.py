"""A model that drafts from the hidden states of another one: which operations, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel, Rename
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage, TokenEmbedding
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.ops import Ops
from shmllm.models.weight_names import TABLE

_FIRST = "model.layers.0"


class EagleModel(DecoderModel):
    """See `EagleSpec`.

    Args:
        config: the configuration, with an `EagleSpec`.
        storage: allocates the weights.
        renames: those of `DecoderModel`.

    Attributes:
        projection: makes one hidden state of several.
        source_norm: the norm of these, or None.
        token_norm, state_norm: the norms of what the first attention reads.
        offsets: [drafted ids] int64, by how much each is smaller than the token id that it stands
            for, or None: these are the same.
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        assert config.eagle is not None, "the model drafts from hidden states"
        self._spec = spec = config.eagle
        hidden, width = config.hidden_size, spec.num_levels * spec.source_width
        self.projection = Linear(width, [hidden], False, storage)
        self.source_norm = Norm(width, config.norm, storage) if spec.norms_sources else None
        self.token_norm = Norm(hidden, config.norm, storage)
        self.state_norm = Norm(hidden, config.norm, storage)
        self.offsets: Tensor | None = None
        if spec.num_drafted < config.vocab_size:
            self.offsets = storage.allocate((spec.num_drafted,), torch.int64)
            self._own_ids = storage.constant(torch.arange(spec.num_drafted))

    def read_tokens_of(self, embedding: TokenEmbedding) -> None:
        """Takes the table of embeddings of the other model if the checkpoint has none."""
        if not self._spec.has_table:
            self.embedding.table = embedding.table

    def combine(self, ops: LogitsOps, sources: Tensor) -> Tensor:
        """Makes one hidden state of those of the other model.

        Args:
            ops: the operations of the device, whose product writes to the result of `Ops.given`.
            sources: [tokens, levels * source_width]; may be overwritten.

        Returns:
            [tokens, hidden].
        """
        if self.source_norm is not None:
            sources = ops.norm(sources, self.source_norm)
        return ops.linear(sources, self.projection)

    def forward(self, ops: Ops) -> Tensor:
        """Runs one step's tokens, each of which follows the token of its given hidden state.

        Returns:
            [tokens, hidden], the input of `logits` for the tokens after these, and the given hidden
            states of these; in the memory of the given ones.
        """
        stream, first = ops.given(), self.layers[0]
        embeds = ops.norm(ops.embed(self.embedding), self.token_norm)
        if self._spec.norms_stream:
            stream = normed = ops.norm(stream, self.state_norm)
        else:
            normed = ops.add_norm(None, stream, self.state_norm, 1.0)
        x = first(ops, None, stream, ops.beside(embeds, normed))
        for layer in self.layers[1:]:
            x = layer(ops, x, stream)
        stream = ops.add_norm(x, stream, None, self.config.residual_scale)
        if self._spec.feeds_normed:
            assert self.norm is not None, "Llama has it"
            stream = ops.norm(stream, self.norm)
        return stream

    def logits(self, ops: LogitsOps, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, drafted ids], of hidden states, [rows, hidden], which may be
        overwritten."""
        if not self._spec.feeds_normed:
            assert self.norm is not None, "Llama has it"
            hidden = ops.norm(hidden, self.norm)
        return super().logits(ops, hidden)

    def of_tokens(self, logits: Tensor) -> Tensor:
        """Returns the logits, [rows, vocab], of all token ids, from those that `logits` returned;
        those of ids that cannot be drafted are minus infinity."""
        if self.offsets is None:
            return logits
        every = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return every.index_copy_(1, self._own_ids + self.offsets, logits)

    def _default_weights(self) -> NamedWeights:
        weights = super()._default_weights() | self.projection.named_weights("fc")
        weights |= self.token_norm.named_weights(f"{_FIRST}.input_layernorm")
        weights |= self.state_norm.named_weights(f"{_FIRST}.hidden_norm")
        if self.source_norm is not None:
            weights |= self.source_norm.named_weights("input_norm")
        if self.offsets is not None:
            weights["d2t"] = (self.offsets,)
        if not self._spec.has_table:
            del weights[TABLE]
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
        for norm in (self.token_norm, self.state_norm, self.source_norm):
            if norm is not None:
                yield norm.weight, 1.0 - norm.spec.offset
        if self.offsets is not None:
            yield self.offsets, 0
