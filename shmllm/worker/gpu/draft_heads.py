"""The steps of models that draft from the hidden states of another one, on a GPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.models.block_model import BlockModel
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.eagle_model import EagleModel
from shmllm.worker.gpu.attention_launches import max_verified
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.logits_ops import GpuLogitsOps
from shmllm.worker.gpu.multi_token_prediction import (
    FurtherResources,
    StatesForward,
    further_dispatcher,
    kept_states,
)
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.loading import LoadedModel


class EagleForward:
    """See `StatesForward`, of a model of EAGLE.

    Args:
        model: the model.
        buffers: the activations and logits of its steps.
        large: the activations of the large model's steps, whose hidden states are in ``kept``, or
            in ``normed`` if it keeps no residual streams.
    """

    runs_behind = True

    def __init__(self, model: EagleModel, buffers: GpuBuffers, large: GpuBuffers) -> None:
        self._model = model
        self._reads_levels = large.kept.shape[1] > 0
        self._sources = large.kept.flatten(1) if self._reads_levels else large.normed
        self.config = model.config
        self.hidden = buffers.given
        self.has_packed = model.has_packed
        self.mask_token = model.mask_token

    def take(self, num_tokens: int, ops: GpuOps) -> None:
        given, sources = self.hidden[:num_tokens], self._sources[:num_tokens]
        if self._reads_levels:
            self._model.combine(GpuLogitsOps(given, ops.products), sources)
        else:
            given.copy_(sources)

    def take_mask(self, num_tokens: int, ops: GpuOps) -> None:
        assert self._model.mask is not None, "it drafts all tokens at once"
        self._sources[:num_tokens].copy_(self._model.mask[0])
        self.take(num_tokens, ops)

    def launch(self, ops: GpuOps, num_tokens: int) -> None:
        after = self._model.forward(ops)
        if after.data_ptr() != self.hidden.data_ptr():  # the residual stream is elsewhere
            self.hidden[:num_tokens].copy_(after)

    def logits(self, states: Tensor, logits: Tensor, ops: GpuOps) -> Tensor:
        own = self._model.logits(GpuLogitsOps(logits, ops.products), states)
        return self._model.of_tokens(own)

    def warm_up(self, ops: GpuOps, states: Tensor, logits: Tensor) -> None:
        for count in {1, len(states)}:
            self.logits(states[:count], logits[:count], ops)
        for count in {1, len(self.hidden)}:
            self.take(count, ops)


class BlockForward:
    """See `StatesForward`, of a model that drafts a block of tokens at once.

    Args:
        model: the model.
        buffers: the activations and logits of its steps.
        large: the activations of the large model's steps, which keeps residual streams.
    """

    runs_behind = False

    def __init__(self, model: BlockModel, buffers: GpuBuffers, large: GpuBuffers) -> None:
        self._model = model
        self._sources = large.kept.flatten(1)
        self._given = buffers.given
        self.config = model.config
        self.hidden = buffers.normed
        self.has_packed = model.has_packed
        self.mask_token = model.mask_token

    def take(self, num_tokens: int, ops: GpuOps) -> None:
        given = GpuLogitsOps(self._given[:num_tokens], ops.products)
        states = self._model.combine(given, self._sources[:num_tokens])
        ops.compute_angles()
        self._model.store(ops, states)

    def take_mask(self, num_tokens: int, ops: GpuOps) -> None:
        """Do nothing: the embeddings stand for tokens that are not known."""

    def launch(self, ops: GpuOps, num_tokens: int) -> None:
        after = self._model.forward(ops)
        assert after.data_ptr() == self.hidden.data_ptr(), "the last norm writes there"

    def logits(self, states: Tensor, logits: Tensor, ops: GpuOps) -> Tensor:
        own = self._model.logits(GpuLogitsOps(logits, ops.products), states)
        return self._model.of_tokens(own)

    def warm_up(self, ops: GpuOps, states: Tensor, logits: Tensor) -> None:
        for count in {1, len(states)}:
            self.logits(states[:count], logits[:count], ops)


def head_resources(
    config: EngineConfig,
    draft: LoadedModel,
    inputs: GpuInputs,
    large: GpuBuffers,
    first: int,
    max_positions: int,
    device: Device,
) -> FurtherResources:
    """Make the objects that compute the steps of such a model, for the largest step. In a group
    rank 0 alone does so.

    Args:
        config: the engine's configuration.
        draft: the model.
        inputs: the inputs of the large model's steps.
        large: the activations of these.
        first: the index of the model's first layer in the groups of the cache.
        max_positions: see `GpuBuffers`.
        device: the device.
    """
    model = draft.model
    assert isinstance(model, DraftingModel), "it drafts from hidden states"
    # Tokens of a block attend to those behind them, as no kernel for few tokens computes.
    causal = config.speculative.most_drafted if isinstance(model, EagleModel) else 0
    buffers = GpuBuffers(
        draft.config,
        draft.dtype,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_num_seqs,
        config.max_drafting,
        device,
        config.load.deterministic,
        max_verified(causal),
        max_positions,
    )
    forward: StatesForward
    if isinstance(model, EagleModel):
        forward = EagleForward(model, buffers, large)
    else:
        assert isinstance(model, BlockModel), "there are two kinds"
        forward = BlockForward(model, buffers, large)
    return FurtherResources(
        forward,
        inputs,
        buffers,
        further_dispatcher(config, causal),
        kept_states(config, model, device),
        device,
        NoMeetings(),
        first,
        (buffers.arena,),
    )
