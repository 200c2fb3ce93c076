"""The steps of a model that drafts on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.models.block_model import BlockModel
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.eagle_model import EagleModel
from shmllm.models.medusa_model import MedusaModel
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.block_drafter import BlockDrafter
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.draft_heads import CpuBlockProgram, CpuEagleProgram
from shmllm.worker.cpu.make_program import Program, arithmetic_of, make_program
from shmllm.worker.cpu.multi_token_prediction import CpuFurtherSteps
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.draft_model import DraftModel
from shmllm.worker.loading import LoadedModel
from shmllm.worker.medusa_drafter import MedusaDrafter
from shmllm.worker.memory_owners import Workspace
from shmllm.worker.multi_token_prediction import MultiTokenPrediction
from shmllm.worker.step_drafter import StepDrafter
from shmllm.worker.step_inputs import StepInputs


def _make_head(
    model: DraftingModel,
    cache: CpuKVCache,
    batch: InputBatch,
    sampler: CpuSampler,
    common: tuple[CpuProgram, Tensor, int, str, bool],
) -> StepDrafter:
    """Make the drafter of a model that reads hidden states, from what `HeadProgram` needs."""
    mask = model.mask_token
    if isinstance(model, BlockModel):
        assert mask is not None, "its configuration has it"
        steps = CpuFurtherSteps(CpuBlockProgram(model, cache, batch, *common), batch, sampler)
        return BlockDrafter(steps, batch, mask)
    assert isinstance(model, EagleModel), "there are two kinds"
    steps = CpuFurtherSteps(CpuEagleProgram(model, *common), batch, sampler)
    return MultiTokenPrediction(steps, batch, mask)


class CpuDraftSteps:
    """See `DraftSteps`.

    Args:
        program: the forward pass of the model.
        batch: the batch, which gets the sampled tokens at once.
        sampler: samples with the parameters in the batch.
    """

    def __init__(self, program: Program, batch: InputBatch, sampler: CpuSampler) -> None:
        self._program = program
        self._batch = batch
        self._sampler = sampler

    def compute(self, inputs: StepInputs) -> None:
        self._program.inputs.fill(inputs)
        self._program.run(inputs)

    def sample(self, inputs: StepInputs, are_drafted: bool) -> None:
        self._program.inputs.fill(inputs)
        _, logits = self._program.run(inputs)
        rows, positions = inputs.sample_rows, inputs.sample_positions
        self._batch.token_ids[rows, positions] = self._sampler.choose(logits, rows, positions)

    def finish(self) -> None:
        """Do nothing: the batch has the tokens."""


class CpuHeadSteps:
    """See `HeadSteps`.

    Args:
        model: the heads.
        batch: the batch, which gets the sampled tokens at once.
        sampler: samples with the parameters in the batch.
    """

    def __init__(self, model: MedusaModel, batch: InputBatch, sampler: CpuSampler) -> None:
        self._model = model
        self._batch = batch
        self._sampler = sampler
        size = batch.block_tables.shape[1], model.config.hidden_size
        self._kept = torch.zeros(size, dtype=model.dtype)

    def keep(self, hidden: Tensor, rows: LongArray, chosen: LongArray) -> None:
        states = hidden[torch.from_numpy(chosen)]
        self._kept[torch.from_numpy(rows)] = states.to(self._kept.dtype)

    def sample(self, place: int, rows: LongArray, positions: LongArray) -> None:
        logits = self._model.predict(place, self._kept[torch.from_numpy(rows)]).float()
        self._batch.token_ids[rows, positions] = self._sampler.choose(logits, rows, positions)

    def finish(self) -> None:
        """Do nothing: the batch has the tokens."""


def make_draft_model(
    config: EngineConfig,
    draft: LoadedModel,
    cache: CpuKVCache,
    first: int,
    batch: InputBatch,
    sampler: CpuSampler,
    num_threads: int,
    large: Program,
) -> tuple[StepDrafter, Workspace | None]:
    """Make the drafter of a loaded draft model.

    Args:
        config: the engine's configuration.
        draft: the model.
        cache: the KV cache of both models.
        first: the index of the model's first layer in the groups of the cache.
        batch, sampler: those of the large model.
        num_threads: the number of threads that compute.
        large: the forward pass of the large model.

    Returns:
        The drafter, and the buffers of its steps, if it has any.
    """
    if isinstance(draft.model, MedusaModel):
        return MedusaDrafter(CpuHeadSteps(draft.model, batch, sampler), batch), None
    view = cache.of_draft(draft.config, first)
    program = make_program(config, draft, view, batch, num_threads)
    if isinstance(draft.model, DraftingModel):
        assert isinstance(program, CpuProgram), "it is one of ours"
        assert isinstance(large, CpuProgram), "the options refuse it for others"
        common = program, large.buffers.kept, num_threads, *arithmetic_of(draft)
        return _make_head(draft.model, view, batch, sampler, common), program.buffers
    steps = CpuDraftSteps(program, batch, sampler)
    layer = view.layers[0]
    max_tokens = config.scheduler.max_num_batched_tokens
    drafter = DraftModel(steps, batch, layer.group, len(layer.blocks), max_tokens)
    return drafter, program.buffers
