"""A model that drafts from the hidden states of another one: which operations, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel, Rename
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.ops import Ops
from shmllm.models.weight_names import LM_HEAD, OTHER_LAYOUT, TABLE

_FIRST = "model.layers.0"


class EagleModel(DecoderModel):
    """See `EagleSpec`.

    Args:
        config: the configuration, with an `EagleSpec`.
        storage: allocates the weights.
        renames: those of `DecoderModel`.

    Attributes:
        projection: makes one hidden state of several, or of an embedding and a hidden state; None:
            the hidden state is that of the other model.
        source_norm: the norm of what it reads of the other model, over all of it, or None.
        level_norms: the norms of each of these states behind that; empty: they have none.
        token_norm, state_norm: the norms of what the first attention reads, or None.
        mask: [1, 1, levels * source_width], or [1, 1, hidden] if there are no levels, what it reads
            in the place of hidden states where tokens are not known, or None.
        offsets: [drafted ids] int64, by how much each is smaller than the token id that it stands
            for, or None: these are the same.
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        assert config.eagle is not None, "the model drafts from hidden states"
        self._spec = spec = config.eagle
        self._lender: DecoderModel | None = None
        hidden, sources = config.hidden_size, spec.num_levels * spec.source_width

        def norm_if(is_there: bool, width: int = hidden) -> Norm | None:
            return Norm(width, config.norm, storage) if is_there else None

        width = 2 * hidden if spec.is_projected else sources
        self.projection = Linear(width, [hidden], spec.has_bias, storage) if width else None
        self.source_norm = norm_if(spec.norms_sources and sources > 0, sources)
        self.level_norms = [
            Norm(spec.source_width, config.norm, storage)
            for _ in range(spec.num_levels * spec.norms_levels)
        ]
        self.token_norm = norm_if(not spec.is_projected)
        self.state_norm = norm_if(not spec.is_projected)
        self.mask: Tensor | None = None
        if spec.mask_token is not None:
            self.mask = storage.tensor(1, 1, sources or hidden)
        self.offsets: Tensor | None = None
        if spec.num_drafted < config.vocab_size:
            self.offsets = storage.allocate((spec.num_drafted,), torch.int64)
            self._own_ids = storage.constant(torch.arange(spec.num_drafted))

    @property
    def mask_token(self) -> int | None:
        """See `EagleSpec.mask_token`."""
        return self._spec.mask_token

    def borrow(self, lender: DecoderModel) -> None:
        """Takes the table of embeddings, and the LM head, of the other model if the checkpoint has
        none."""
        if not self._spec.has_table:
            self.embedding.table = lender.embedding.table
        if not self._spec.has_head:
            self._lender = lender

    def combine(self, ops: LogitsOps, sources: Tensor) -> Tensor:
        """Makes one hidden state of residual streams of the other model.

        Args:
            ops: the operations of the device, whose product writes to the result of `Ops.given`.
            sources: [tokens, levels * source_width]; may be overwritten.

        Returns:
            [tokens, hidden].
        """
        assert self.projection is not None, "it is of a model that reads them"
        if self.source_norm is not None:
            sources = ops.norm(sources, self.source_norm)
        width = self._spec.source_width
        for norm, part in zip(self.level_norms, sources.split(width, 1), strict=False):
            ops.norm(part, norm)
        return ops.linear(sources, self.projection)

    def forward(self, ops: Ops) -> Tensor:
        """Runs one step's tokens, each of which follows the token of its given hidden state.

        Returns:
            [tokens, hidden], the input of `logits` for the tokens after these, and the given hidden
            states of these.
        """
        stream, mixed = self._begin(ops)
        x: Tensor | None = None
        for layer in self.layers:
            x, mixed = layer(ops, x, stream, mixed), None
        stream = ops.add_norm(x, stream, None, self.config.residual_scale)
        if self._spec.feeds_normed:
            assert self.norm is not None, "EAGLE-3 has it"
            stream = ops.norm(stream, self.norm)
        return stream

    def _begin(self, ops: Ops) -> tuple[Tensor, Tensor | None]:
        """Begins the residual stream, [tokens, hidden]. Returns it, and what the first layer's
        attention reads, [tokens, 2 * hidden], if that is not the stream."""
        embeds, stream = ops.embed(self.embedding), ops.given()
        if self.token_norm is None or self.state_norm is None:
            assert self.projection is not None, "it joins both"
            return ops.project(ops.beside(embeds, stream), self.projection), None
        embeds = ops.norm(embeds, self.token_norm)
        if self._spec.norms_stream:
            stream = normed = ops.norm(stream, self.state_norm)
        else:
            normed = ops.add_norm(None, stream, self.state_norm, 1.0)
        return stream, ops.beside(embeds, normed)

    def logits(self, ops: LogitsOps, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, drafted ids], of hidden states, [rows, hidden], which may be
        overwritten."""
        if self.norm is not None and not self._spec.feeds_normed:
            hidden = ops.norm(hidden, self.norm)
        return (
            super().logits(ops, hidden)
            if self._lender is None
            else self._lender.logits(ops, hidden)
        )

    def of_tokens(self, logits: Tensor) -> Tensor:
        """Returns the logits, [rows, vocab], of all token ids, from those that `logits` returned;
        those of ids that cannot be drafted are minus infinity."""
        if self.offsets is None:
            return logits
        every = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return every.index_copy_(1, self._own_ids + self.offsets, logits)

    def _default_weights(self) -> NamedWeights:
        weights = super()._default_weights()
        if self.projection is not None:
            weights |= self.projection.named_weights("fc")
        for name, norm in self._norms.items():
            weights |= norm.named_weights(name)
        if self.offsets is not None:
            weights["d2t"] = (self.offsets,)
        if self.mask is not None:
            weights["mask_hidden"] = (self.mask,)
        if not self._spec.has_table:
            del weights[TABLE]
        if not self._spec.has_head:
            del weights[LM_HEAD]
        return weights

    def _name_module_weights(self) -> NamedWeights:
        weights = super()._name_module_weights()
        if self.mask is not None:  # some files have it as a row
            weights[f"mask_hidden{OTHER_LAYOUT}"] = (self.mask[0],)
        return weights

    @property
    def _norms(self) -> dict[str, Norm]:
        """Its own norms by their names."""
        named = {
            "input_norm": self.source_norm,
            f"{_FIRST}.input_layernorm": self.token_norm,
            f"{_FIRST}.hidden_norm": self.state_norm,
            **{f"fc_norm.{index}": norm for index, norm in enumerate(self.level_norms)},
        }
        return {name: norm for name, norm in named.items() if norm is not None}

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
        for norm in self._norms.values():
            yield norm.weight, 1.0 - norm.spec.offset
        if self.offsets is not None:
            yield self.offsets, 0
