"""A model of EAGLE: which operations, in which order."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import Rename
from shmllm.models.draft_specs import EagleSpec
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.ops import Ops
from shmllm.models.weight_names import OTHER_LAYOUT

_FIRST = "model.layers.0"


class EagleModel(DraftingModel):
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
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        assert isinstance(config.drafting, EagleSpec), "it is such a model"
        self._spec = spec = config.drafting
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

    def combine(self, ops: LogitsOps, sources: Tensor) -> Tensor:
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
        if self.norm is not None and not self._spec.feeds_normed:
            hidden = ops.norm(hidden, self.norm)
        return super().logits(ops, hidden)

    def _default_weights(self) -> NamedWeights:
        weights = super()._default_weights()
        if self.projection is not None:
            weights |= self.projection.named_weights("fc")
        if self.mask is not None:
            weights["mask_hidden"] = (self.mask,)
        return weights

    def _name_module_weights(self) -> NamedWeights:
        weights = super()._name_module_weights()
        if self.mask is not None:  # some files have it as a row
            weights[f"mask_hidden{OTHER_LAYOUT}"] = (self.mask[0],)
        return weights

    @property
    def own_norms(self) -> dict[str, Norm]:
        named = {
            "input_norm": self.source_norm,
            f"{_FIRST}.input_layernorm": self.token_norm,
            f"{_FIRST}.hidden_norm": self.state_norm,
            **{f"fc_norm.{index}": norm for index, norm in enumerate(self.level_norms)},
        }
        return {name: norm for name, norm in named.items() if norm is not None}
