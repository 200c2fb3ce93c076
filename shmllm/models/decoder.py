"""The decoder that all families share: which operations, in which order.

This module owns the order of operations and the names of weights. It must not know requests, nor
families, whose configuration says what each layer is, nor how an operation is computed, which is
the task of `ops.Ops`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shmllm.models.altup import AltUp
from shmllm.models.branch import BranchLayer
from shmllm.models.config import ModelConfig
from shmllm.models.connections import Connection
from shmllm.models.decoder_layer import DecoderLayer
from shmllm.models.experts import mixture_of
from shmllm.models.further_layer import FurtherLayer
from shmllm.models.heads import Head
from shmllm.models.layers import NamedWeights, Norm, Storage, TokenEmbedding
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.matrices import Matrix, addresses, elsewhere_or, parts_of, sharded
from shmllm.models.model import Model
from shmllm.models.ops import Ops
from shmllm.models.per_layer import PerLayerInputs
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.shares import Division, Share
from shmllm.models.streams import begin_streams, end_streams
from shmllm.models.towers import make_towers
from shmllm.models.transform import Transform
from shmllm.models.weight_names import LM_HEAD, model_name, tower_name
from shmllm.models.widths import reads_embeds

Rename = Callable[[NamedWeights, ModelConfig], NamedWeights]
"""Returns the destinations of a family's names, made from those of the default names."""
_OF_EXPERT = re.compile(r"model\.layers\.([0-9]+)\.mlp\.experts\.([0-9]+)\.")


class DecoderModel(Model):
    """Embedding, layers, final norm, LM head and the head behind pooling.

    Args:
        config: the configuration.
        storage: allocates the weights.
        rename: the family's ``named_weights``; None: its names are the default ones.
        rename_modules: its ``module_weights``, likewise.
        other_names: its ``other_names``, which returns more destinations; None: there are none.

    Attributes:
        norm: the final norm, or None.
        last_connection: what makes one of several residual streams, or None.
        head: what is computed of pooled hidden states, or None.
        partial: the addresses of matrices whose products are parts of a sum over a group's ranks.
        further: the layers behind the others that are loaded, each of which predicts one token
            further ahead.
        vision: what makes embeddings of images, or None. It has memory in the first stage of a
            pipeline, and in rank 0 of a group that divides each layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        storage: Storage,
        rename: Rename | None = None,
        rename_modules: Rename | None = None,
        other_names: Rename | None = None,
    ) -> None:
        super().__init__(config, storage.dtype)
        self._rename, self._rename_modules = rename, rename_modules
        self._other_names, self._left_out = other_names, left_out(config)
        self._division: Division | None = None
        self._matrix_shares: dict[int, Share] = {}
        self.partial: frozenset[int] = frozenset()
        self._is_stage = config.stage.layers is not None and not storage.has_all
        self.embedding = TokenEmbedding(config, storage)
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer is not None:
            self.per_layer = PerLayerInputs(config, config.per_layer, storage)
        self.altup = None if config.altup is None else AltUp(config, config.altup, storage)
        self.last_connection: Connection | None = None
        if config.connections is not None:
            own = storage.kept_if(config.stage.is_last)
            of_streams = config.hidden_size, config.connections, own
            self.last_connection = Connection(*of_streams, is_last=True)
        stage = config.stage
        self.layers: list[DecoderLayer] = []
        for index, source in enumerate(config.weights_of or range(config.num_layers)):
            own = storage.kept_if(stage.has(index))
            is_new = index == source
            self.layers.append(self._make_layer(index, own) if is_new else self.layers[source])
        mixtures = (mixture_of(layer.mlp) for layer in self.layers)
        for place, mixture in enumerate(each for each in mixtures if each is not None):
            mixture.place = place
        of_last = storage.kept_if(stage.is_last)
        last = config.last_norm or config.norm
        self.norm = Norm(config.hidden_size, last, of_last) if config.final_norm else None
        self.transform: Transform | None = None
        if config.transform is not None and config.lm_head:
            self.transform = Transform(config, config.transform, of_last)
        self.head: Head | None = None
        if config.head is not None:  # the first stage gets the hidden states and pools them
            of_first = storage.kept_if(stage.is_first)
            self.head = Head(config.head, config.vocab_size, of_first)
        behind = range(config.num_layers, len(config.loaded_layers))
        self.further = [FurtherLayer(config, layer, storage) for layer in behind]
        of_tower = storage.kept_if(stage.is_first and config.shard.rank == 0)
        self.towers = make_towers(config.towers, config.hidden_size, of_tower)

    def _make_layer(self, index: int, storage: Storage) -> DecoderLayer:
        branch = self.config.layers[index].branch
        if branch is None:
            return DecoderLayer(self.config, index, storage)
        shared = None if branch.source == index else self.layers[branch.source]
        assert shared is None or isinstance(shared, BranchLayer), "families say so"
        return BranchLayer(self.config, index, storage, shared)

    def divide(self, division: Division, matrices: Sequence[Matrix]) -> None:
        """Records that this is a rank's part of a model.

        Args:
            division: which part.
            matrices: its matrices of products, in the order of their allocation.
        """
        self._division = division
        self._matrix_shares = {
            addresses(matrix).start: share
            for matrix, share in zip(matrices, division.matrices, strict=True)
        }
        self.partial = frozenset(
            begin for begin, share in self._matrix_shares.items() if not share.has_all_columns
        )

    def share_of(self, matrix: Matrix) -> Share | None:
        """Returns which elements of the whole model's matrix a matrix of products has; None: this
        is a whole model."""
        return None if self._division is None else self._matrix_shares[addresses(matrix).start]

    @property
    def has_packed(self) -> bool:
        """Whether a matrix is packed or rounded."""
        views = (view for views in self._named_weights.values() for view in views)
        return any(isinstance(part, QuantizedMatrix) for view in views for part in parts_of(view))

    def forward(self, ops: Ops) -> Tensor:
        """Runs one step's tokens through all layers and the final norm, or through those that a
        stage of a pipeline has.

        Returns:
            [tokens, hidden], the input of `logits`; of a stage that is not the last one, the
            residual stream.
        """
        residual, stage = self.embed(ops), self.config.stage
        vision, x = self.config.vision, None
        levels = list(vision.layers_of_levels()) if vision else []
        for index, layer in enumerate(self.layers):
            if stage.has(index):
                x = layer(ops, self._keep(ops, x, residual, index), residual)
                if index in levels:
                    ops.add_level(residual, levels.index(index))
        return self.finish(ops, self._keep(ops, x, residual, self.config.num_layers), residual)

    def _keep(self, ops: Ops, x: Tensor | None, residual: Tensor, level: int) -> Tensor | None:
        """Keeps the residual stream if it is one of the levels that are kept. Returns what is still
        to be added to it."""
        places = [i for i, each in enumerate(self.config.kept_levels) if each == level]
        if not places:
            return x
        ops.add_norm(x, residual, None, self.config.residual_scale)
        for place in places:
            ops.keep(residual, place)
        return None

    def embed(self, ops: Ops) -> Tensor:
        """Computes what the first layer, or that of a stage, reads of one step's tokens."""
        stage = self.config.stage
        residual = ops.embed(self.embedding) if stage.is_first else ops.receive()
        if stage.is_first and self.embedding.norm is not None:
            residual = ops.norm(residual, self.embedding.norm)
        if stage.is_first and self.embedding.projection is not None:
            residual = ops.project(residual, self.embedding.projection)
        if self.per_layer is not None:
            ops.embed_per_layer(residual, self.per_layer)
        if self.altup is not None:
            begin_streams(ops, self.altup)
        if stage.is_first and self.last_connection is not None:
            ops.repeat_stream(residual)
        if reads_embeds(self.config):
            ops.set_aside(residual)
        return residual

    def finish(self, ops: Ops, x: Tensor | None, residual: Tensor) -> Tensor:
        """Computes what `forward` returns from what the last layer leaves: what is still to be
        added to the residual stream, or None, and that stream."""
        if self.altup is not None:
            residual = end_streams(ops, self.altup)
        if self.config.stage.is_last and self.last_connection is not None:
            residual = ops.fold_streams(self.last_connection)
        norm = self.norm if self.config.stage.is_last else None
        return ops.add_norm(x, residual, norm, self.config.residual_scale)

    def logits(self, ops: LogitsOps, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab], of hidden states, [rows, hidden]."""
        assert self.embedding.head is not None, "the model has an LM head"
        if self.transform is not None:
            hidden = ops.norm(ops.transform(hidden, self.transform), self.transform.norm)
        logits = ops.linear(hidden, self.embedding.head)
        scale, cap = self.config.logits_scale, self.config.logits_cap
        if scale != 1 or cap is not None:
            logits = ops.scale_and_cap(logits, scale, cap)
        outputs = self.config.num_outputs
        return logits if outputs is None else ops.forbid_behind(logits, outputs)

    def known_name(self, name: str) -> str | None:
        of_towers = (tower.known_name(name) for tower in self.towers.values())
        of_tower = next((known for known in of_towers if known is not None), None)
        if of_tower is not None or (self.towers and tower_name(name) is not None):
            return of_tower
        known = model_name(name, self.config.tie_word_embeddings)
        if known is None or known.startswith(self._left_out):
            return None
        return None if self._is_of_skipped_expert(known) else known

    def _is_of_skipped_expert(self, name: str) -> bool:
        if self.config.skipped_experts is None:
            return False
        layers, experts = self.config.skipped_experts
        found = _OF_EXPERT.match(name)
        return found is not None and int(found[1]) in layers and int(found[2]) in experts

    def _default_weights(self) -> NamedWeights:
        """Returns the destinations of the default names, but for those of heads and towers."""
        weights = self.embedding.named_weights()
        if self.per_layer is not None:
            weights |= self.per_layer.named_weights()
        if self.altup is not None:
            weights |= self.altup.named_weights()
        if self.last_connection is not None:
            weights |= self.last_connection.named_weights("model.hc_head.hc_")
        for index, layer in enumerate(self.layers):
            weights |= layer.named_weights(f"model.layers.{index}")
        for index, further in enumerate(self.further, self.config.num_layers):
            weights |= further.named_weights(f"model.layers.{index}")
        if self.norm is not None:
            weights |= self.norm.named_weights("model.norm")
        return weights if self.transform is None else weights | self.transform.named_weights()

    def _name_weights(self) -> NamedWeights:
        weights = self._default_weights()
        if self._rename is not None:
            weights = self._rename(weights, self.config)
        if self.head is not None:
            for name, views in self.head.named_weights(self._name_of_lm_head(weights)).items():
                weights[name] = (*weights.get(name, ()), *views)
        for tower in self.towers.values():
            weights |= tower.named_weights
        return self._shares_of(weights)

    def _name_of_lm_head(self, weights: NamedWeights) -> str:
        """Returns the name of what an LM head has in checkpoints."""
        if not self.config.tie_word_embeddings:
            return LM_HEAD
        return next(name for name, (view, *_) in weights.items() if view is self.embedding.table)

    def _name_module_weights(self) -> NamedWeights:
        weights: NamedWeights = {}
        for index, layer in enumerate(self.layers):
            weights |= layer.module_weights(f"model.layers.{index}")
        for index, further in enumerate(self.further, self.config.num_layers):
            weights |= further.layer.module_weights(f"model.layers.{index}")
        if self._rename_modules is not None:
            weights = self._rename_modules(weights, self.config)
        if self._other_names is not None:
            weights |= self._other_names(self._default_weights(), self.config)
        for tower in self.towers.values():
            weights |= tower.module_weights
        return self._shares_of(weights)

    def _shares_of(self, weights: NamedWeights) -> NamedWeights:
        if self._is_stage:
            return {name: tuple(map(elsewhere_or, views)) for name, views in weights.items()}
        if self._division is None:
            return weights
        shares = self._division.shares
        own = {name: sharded(views, shares[name]) for name, views in weights.items()}
        return {name: tuple(map(elsewhere_or, views)) for name, views in own.items()}

    def check_weights(self) -> None:
        """Raises ValueError if the weights that were loaded cannot be computed with."""

    def neutral_weights(self) -> Iterator[tuple[Tensor, float]]:
        """Yields the weights of norms and of other factors, with the value that changes nothing."""
        last = None if self.transform is None else self.transform.norm
        norms = [norm for norm in (self.norm, self.embedding.norm, last) if norm is not None]
        norms += [] if self.per_layer is None else [self.per_layer.norm]
        norms += [] if self.head is None else [s for s in self.head.steps if isinstance(s, Norm)]
        for tower in self.towers.values():
            yield from tower.neutral_weights
        for further in self.further:
            norms += further.norms
        for layer in (*self.layers, *(further.layer for further in self.further)):
            norms += layer.all_norms()
            yield from layer.neutral_factors()
        for norm in norms:
            for weight in norm.rows:
                yield weight, 1.0 - norm.spec.offset


def left_out(config: ModelConfig) -> tuple[str, ...]:
    """The prefixes of names of a checkpoint's tensors that are not loaded."""
    behind = range(config.num_layers, config.num_layers + len(config.further_layers))
    prefixes = [f"model.layers.{index}." for index in behind]
    copies = ("embed_tokens.", "shared_head.head.")  # of the model's own
    loaded = [f"{each}{name}" for each in prefixes[: config.num_further] for name in copies]
    steps = () if config.head is None else config.head.steps
    has_lm_head = config.lm_head or config.classes_are_tokens
    is_head = any(step.name == LM_HEAD.removesuffix(".weight") for step in steps)
    of_head = () if has_lm_head or is_head else ("lm_head.",)
    return (*config.skipped_prefixes, *of_head, *loaded, *prefixes[config.num_further :])
