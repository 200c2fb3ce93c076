"""The embeddings of items, such as images: computed by the model's towers, kept by number, copied
into steps.

The plan says what is encoded, used and forgotten. This module must not know which requests there
are, nor how embeddings are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import Encode, StepPlan
from shmllm.models.decoder import DecoderModel
from shmllm.models.text.specs import TextSpec
from shmllm.models.vision.specs import VisionSpec
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.item_encoders import Encoder, GivenEncoder, Send, make_encoder
from shmllm.worker.item_places import item_places
from shmllm.worker.loading import LoadedModel, item_info
from shmllm.worker.prompt_embeds import FoundEmbeds
from shmllm.worker.step_inputs import StepInputs

_GIVEN = "embeddings"
"""In place of a modality: items of which users give the embeddings."""


class PrefixWriter(Protocol):
    """Writes keys and values that an encoder computes to a device's KV cache."""

    def write(self, embeds: Tensor, slots: LongArray) -> None:
        """Write keys and values.

        Args:
            embeds: [positions, width]: for each layer its keys, then its values.
            slots: (groups, positions) int64, the slots of the KV cache in each group of layers.
        """


class ItemEmbeds:
    """
    Args:
        encoders: what computes embeddings, by modality, or `_GIVEN`.
        are_results: whether these are the results of prompts, and no token has one.
    """

    def __init__(self, encoders: Mapping[str, Encoder], are_results: bool = False) -> None:
        self._encoders = encoders
        self._are_results = are_results
        self._by_number: dict[int, Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Forget and compute embeddings, in this order."""
        for number in plan.forgotten:
            self._by_number.pop(number, None)  # a sleep may have dropped it
        by_modality: dict[str, list[Encode]] = {}
        for each in plan.encodes:
            kind = _GIVEN if each.item.is_embeds else each.item.modality
            by_modality.setdefault(kind, []).append(each)
        for modality, encodes in by_modality.items():
            found = self._encoders[modality]([each.item for each in encodes])
            for each, embeds in zip(encodes, found, strict=True):
                self._by_number[each.number] = embeds

    def find(self, plan: StepPlan, inputs: StepInputs) -> list[FoundEmbeds]:
        """Return the embeddings of a step's tokens, in the tower's width."""
        if self._are_results:
            return []
        return [
            (place.tokens, self._by_number[place.number][place.embeds])
            for place in item_places(plan, inputs.first_tokens)
        ]

    def results(self, plan: StepPlan) -> dict[int, Tensor]:
        """Return the results of requests, [1, width], by their indices in the columns of a plan."""
        if not self._are_results:
            return {}
        return {use.column: self._by_number[use.number] for use in plan.item_uses}

    def write_prefixes(
        self, plan: StepPlan, batch: InputBatch, writer: PrefixWriter | None
    ) -> None:
        """Write the keys and values of a step's encoded prefixes to the KV cache.

        Args:
            plan: says of which rows.
            batch: has the blocks of the rows.
            writer: the device's; None: the model has no such prefixes.
        """
        for prefix in plan.prefixes:
            assert writer is not None, "the model has an encoder"
            embeds = self._by_number[prefix.number][prefix.first :]
            end = prefix.first + len(embeds)
            writer.write(embeds, batch.slots_of(prefix.row, prefix.first, end))

    @property
    def workspace_bytes(self) -> int:
        """The memory of all embeddings."""
        return sum(each.nbytes for each in self._by_number.values())

    def drop_workspace(self) -> None:
        """Forget all embeddings. Nothing uses them any more."""
        self._by_number.clear()


def make_item_embeds(loaded: LoadedModel, send: Send = torch.tensor) -> ItemEmbeds:
    """Make what keeps the embeddings of a model's items.

    Args:
        loaded: the model.
        send: see `item_encoders.Send`.

    Raises:
        EngineStartError: the model's directory does not say how images are prepared.
    """
    model, directory = loaded.model, loaded.load.directory
    if not isinstance(model, DecoderModel):
        return ItemEmbeds({})
    specs, table = loaded.config.towers, model.embedding.table
    encoders: dict[str, Encoder] = {
        name: make_encoder(name, specs[name], tower, table, directory, send)
        for name, tower in model.towers.items()
    }
    given = GivenEncoder(loaded.dtype, send)
    return ItemEmbeds({**encoders, _GIVEN: given}, are_results=loaded.config.pooled_width > 0)


def item_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return about the most memory that the embeddings of items take, and a tower that computes
    those of the largest item, or tile."""
    model = loaded.config
    if not model.towers:
        return 0
    most = item_info(config, model, loaded.max_model_len).most_embeds
    kept = most * model.item_width * loaded.dtype.itemsize
    computed = []
    for spec in model.towers.values():
        if isinstance(spec, VisionSpec):
            size = spec.patch_size
            patches = spec.most_patches or most * spec.merge_size**2
            of_patch = (spec.most_activations + 3 * size**2) * loaded.dtype.itemsize + 3 * size**2
            joined = spec.most_joined * model.item_width * loaded.dtype.itemsize
            computed.append(patches * of_patch + joined)
        elif isinstance(spec, TextSpec):
            of_token = spec.tower.most_activations * loaded.dtype.itemsize
            computed.append(spec.tower.most_tokens * of_token)
        else:
            of_frame = spec.tower.most_activations * loaded.dtype.itemsize
            of_frame += spec.tower.num_mels * (4 + loaded.dtype.itemsize)
            computed.append(spec.tower.most_frames * of_frame)
    return kept + max(computed)


def spread_levels(levels: Tensor, found: Sequence[FoundEmbeds], num_tokens: int) -> None:
    """Write what images add behind the first layers, and zeros for all other tokens.

    Args:
        levels: [levels, tokens or more, hidden], where it goes.
        found: the result of `ItemEmbeds.find`, [n, (1 + levels) * hidden] each, or [n, hidden] of
            sounds, which have none.
        num_tokens: the number of the step's tokens.
    """
    hidden = levels.shape[2]
    levels[:, :num_tokens] = 0
    for tokens, rows in found:
        if rows.shape[1] > hidden:
            parts = rows[:, hidden:].unflatten(1, (len(levels), hidden))
            levels[:, tokens] = parts.transpose(0, 1).to(levels.dtype)
