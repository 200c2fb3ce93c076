"""The objects that compute a model's steps on a GPU, all but the KV cache.

This module owns that these objects have the same sizes. Their addresses must not change, since
captured graphs contain them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.config.load import DecodeKernel
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.entries import stored_kv
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.medusa_model import MedusaModel
from shmllm.models.rope_config import count_axes
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.attention_launches import max_verified
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache, block_bytes, cache_bytes
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_heads import head_resources
from shmllm.worker.gpu.draft_model import DraftModelResources
from shmllm.worker.gpu.draft_resources import DraftResources
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, GraphDispatcher
from shmllm.worker.gpu.group import DeviceGroup, GpuMeetings, NoMeetings
from shmllm.worker.gpu.heads import make_head
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.kv_dtype import kv_dtype
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.medusa import MedusaResources
from shmllm.worker.gpu.multi_token_prediction import FurtherResources
from shmllm.worker.gpu.plain_arena import PlainArena
from shmllm.worker.gpu.program import GpuProgram, Program
from shmllm.worker.gpu.sampler import GpuSampler
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory import CacheShape


@dataclass(frozen=True, slots=True)
class StepResources:
    """The objects that compute steps.

    Attributes:
        loaded: the loaded model.
        device: the device.
        shape: the groups of layers of the KV cache.
        kv_dtype: the dtype of keys and values.
        batch: the state of the running requests, on the host.
        sampler: the sampler, with the state of the running requests on the device.
        inputs: the inputs of a step.
        buffers: the activations and logits of a step.
        max_logprobs: the largest number of alternatives that a request may ask for; -1: no limit.
        lora: the adapters of a step; None: there are none.
        has_processors: whether there are custom logits processors.
        drafts: the objects that compute the steps of a model that drafts; None: no model does.
        meetings: the meetings of the ranks of a group. Only rank 0 samples.
        decode_kernel: the option of this name.
    """

    loaded: LoadedModel
    device: Device
    shape: CacheShape
    kv_dtype: torch.dtype
    batch: InputBatch
    sampler: GpuSampler
    inputs: GpuInputs
    buffers: GpuBuffers
    max_logprobs: int
    lora: GpuLora | None = None
    has_processors: bool = False
    drafts: DraftResources | None = None
    meetings: NoMeetings = field(default_factory=NoMeetings)
    decode_kernel: DecodeKernel = "auto"

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        loaded: LoadedModel,
        draft: LoadedModel | None,
        draft_config: ModelConfig | None,
        device: Device,
        group: DeviceGroup | None = None,
    ) -> StepResources:
        """Make the objects for the largest step that the scheduler's limits allow.

        Args:
            config: the engine's configuration.
            loaded: the model.
            draft: the model that drafts for it; None: there is none here.
            draft_config: the configuration of that model, also where rank 0 alone has it.
            device: the device.
            group: the group of which this process is a rank; None: it is alone.

        Raises:
            EngineStartError: the ranks cannot share memory of their devices.
        """
        model, max_model_len = loaded.config, loaded.max_model_len
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        block_size = config.cache.block_size
        kept = kv_dtype(config.load, loaded.dtype)
        shape = CacheShape.of(
            config,
            model,
            lambda heads: block_bytes(heads, block_size, kept),
            draft_config,
        )
        num_groups = len(shape.groups)
        samples, drafts = config.max_samples, config.max_drafts
        batch = InputBatch(
            rows,
            max_model_len,
            block_size,
            model.vocab_size,
            num_groups,
            samples_ahead=not config.speculative.most_drafted,
            max_drafts=drafts,
            patches_per_side=model.patches_per_side,
            grid_axes=model.vision.grid_axes if model.vision else 0,
            canvas=model.vision.canvas if model.vision else None,
            video_times=model.video_times,
            spans_prompts=model.spans_prompts,
            has_encoder=model.num_encoded > 0,
        )
        num_logits = model.vocab_size if model.lm_head else 1  # nothing is sampled
        sampler = GpuSampler(
            batch,
            rows,
            num_logits,
            device,
            config.logprobs.mode,
            returns_masks=config.logprobs.returns_masks,
        )
        max_blocks = -(-max_model_len // block_size)
        last_tokens = sampler.last_tokens
        both = (model,) if draft_config is None else (model, draft_config)
        every = (each.ahead for config in both for each in config.attentions)
        aheads = dict.fromkeys(ahead for ahead in every if ahead != 0)
        sizes = tokens, rows, samples
        inputs = GpuInputs(
            *sizes,
            max_blocks,
            num_groups,
            last_tokens,
            device,
            tuple(aheads),
            model.num_token_types > 0,
            count_axes(model.ropes),
        )
        options = config.load.deterministic, max_verified(config.speculative.most_drafted)
        buffers = GpuBuffers(
            model, loaded.dtype, *sizes, device, *options, max_model_len, block_size
        )
        meetings = NoMeetings()
        if group is not None:
            assert isinstance(loaded.model, DecoderModel), "the options refuse a group for others"
            meetings = GpuMeetings(group, loaded.model, *sizes, device)
        made: DraftResources | None = None
        if draft is not None and isinstance(draft.model, MedusaModel):
            made = MedusaResources.of(config, draft.model, device)
        elif draft is not None and isinstance(draft.model, DraftingModel):
            own = config, draft, inputs, buffers, len(stored_kv(model)), max_model_len, device
            made = head_resources(*own)
        elif draft is not None:
            made = DraftModelResources.allocate(config, draft, model, inputs, device)
        elif config.load.further_layers:
            assert isinstance(loaded.model, DecoderModel), "the options refuse it for others"
            made = FurtherResources.of_layer(
                config, loaded.model, inputs, buffers, device, meetings
            )
        return cls(
            loaded,
            device,
            shape,
            kept,
            batch,
            sampler,
            inputs,
            buffers,
            config.logprobs.max_logprobs,
            _make_lora(config, loaded, device) if config.lora.enable_lora else None,
            bool(config.plugins.logits_processors or loaded.config.num_encoded),
            made,
            meetings,
            config.load.decode_kernel,
        )

    def make_program(self, cache: GpuKVCache, dispatcher: GraphDispatcher) -> Program:
        """Make the program that computes steps with a KV cache and a dispatcher."""
        model = self.loaded.model
        common = cache, self.inputs, self.buffers, self.device
        if isinstance(model, DecoderModel):
            resources = self.lora, self.meetings, self.decode_kernel
            return GpuProgram(model, *common, dispatcher, *resources)
        # It imports transformers, which takes seconds.
        from shmllm.models.transformers_impl.model import TransformersModel
        from shmllm.worker.gpu.transformers_program import GpuTransformersProgram

        assert isinstance(model, TransformersModel), "there are two kinds of models"
        return GpuTransformersProgram(model, *common)

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Compute and sample the largest step, with a KV cache of one block, and allocate what any
        request may make a step allocate: after this the KV cache gets all memory that is left."""
        tokens = len(self.buffers.hidden)
        model, dtype = self.loaded.config, self.kv_dtype
        size = cache_bytes(self.shape, dtype, 1)
        arena = PlainArena(
            size, "a block of the KV cache", self.device.torch_device, "it is temporary"
        )
        rows = min(len(self.inputs.step.rows), tokens)
        drafts = min(len(self.buffers.logits), tokens) - rows
        cache = GpuKVCache(model, dtype, self.shape, 1, arena)
        program = self.make_program(cache, GraphDispatcher(CudaGraphMode.NONE, None, rows, tokens))
        largest = BatchDescriptor(tokens, rows, uniform=False, num_drafts=drafts)
        self.inputs.idle(largest)
        program.begin()
        hidden, logits = program.run(CudaGraphMode.NONE, largest, tokens)
        if model.lm_head:
            self._sample_largest(program, hidden, logits)
        if self.drafts is not None:
            self.drafts.run_largest(cache)
        if not self.meetings.has_rest:
            return
        hidden.float()  # of pooling requests
        head = make_head(self.loaded.model, self.device)
        if head is not None:
            head(torch.zeros(tokens, model.hidden_size))

    def _sample_largest(self, program: Program, hidden: Tensor, logits: Tensor) -> None:
        """Sample at the logits of the largest step, and score the most tokens of a prompt."""
        scorer = self.sampler.scorer
        if self.meetings.has_rest:
            self.sampler.warm_up(logits)
            # If all rows ask, no row is copied to leave out others.
            scorer.run_largest(logits, max(len(logits) - 1, 1), self.max_logprobs)
        program.begin()
        of_prompt = program.compute_logits(hidden[: scorer.rows_at_once])
        if not self.meetings.has_rest:
            return
        scorer.run_largest(of_prompt, len(of_prompt), self.max_logprobs)
        del of_prompt
        if self.has_processors:  # the logits of their batch, what they return, and a copy of it
            torch.empty((3, *logits.shape), dtype=torch.float32, device=logits.device)


def _make_lora(config: EngineConfig, loaded: LoadedModel, device: Device) -> GpuLora:
    lora = config.lora
    if lora.lora_dtype not in ("auto", loaded.dtype_name):
        raise EngineStartError(
            f"lora_dtype={lora.lora_dtype!r} is for the CPU: on a GPU adapters have the dtype of "
            "the weights"
        )
    assert isinstance(loaded.model, DecoderModel), "the options refuse adapters of others"
    max_tokens = config.scheduler.max_num_batched_tokens
    return GpuLora(
        LoraTargets(loaded.model, lora.target_modules),
        lora.max_loras,
        lora.max_lora_rank,
        max_tokens,
        max_tokens * max((each.top_k for each in loaded.config.mixtures), default=0),
        loaded.dtype,
        device,
    )
