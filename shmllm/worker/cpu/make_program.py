"""Makes the program that computes a model's steps on a CPU: our kernels, or a module of
transformers with our attention.

The second needs transformers, which this module imports for such a model only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.model import Model
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu import program
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.heads import CpuHead
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.instructions import activation_dtype, instruction_of, uses_tiles
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.pipeline import CpuPipeline
from shmllm.worker.cpu.products import dtype_name
from shmllm.worker.group import Group
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory_owners import Workspace
from shmllm.worker.step_inputs import StepInputs


class Program(Protocol):
    """Computes a model's steps.

    Attributes:
        inputs: the inputs of the step.
        buffers: the activations.
        embeds: [max_tokens, hidden] float32, which may be filled with embeddings before a step.
        levels: [levels, max_tokens, hidden] float32, which may be filled with what images add
            behind the first layers; None: there are none.
        observe: if set, each kernel runs inside the context manager that this makes of its label;
            steps take longer then.
        routed: [max_tokens, mixtures, top_k], the experts of the tokens of the last step, see
            `RoutedInfo`; None: they are not kept.
        deterministic: whether a request's bits depend on its own tokens only.
    """

    observe: Observe | None
    deterministic: bool

    @property
    def inputs(self) -> CpuInputs: ...

    @property
    def buffers(self) -> Workspace: ...

    @property
    def embeds(self) -> Tensor: ...

    @property
    def levels(self) -> Tensor | None: ...

    @property
    def routed(self) -> Tensor | None: ...

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Compute the step whose inputs are in `self.inputs`.

        Args:
            inputs: the same inputs, for their sizes.

        Returns:
            The hidden states of the step's tokens after the final norm, [T, hidden], and the
            logits of its samples, [N, vocab], both float32. The next step may overwrite both.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] float32, of some hidden states that `run` returned,
        [rows, hidden]."""
        ...


def check_model(
    config: ModelConfig, load: LoadConfig, dtype: str, packed: Collection[str] = ()
) -> None:
    """Raise EngineStartError if a model cannot be computed; see `loading.Check`."""
    if load.model_impl != "transformers":
        program.check_model(config, load, dtype, packed)


def make_lora(config: EngineConfig, loaded: LoadedModel, group: Group) -> CpuLora | None:
    """Make what computes with adapters; None: the options say that there are none."""
    lora, model = config.lora, loaded.model
    if not lora.enable_lora:
        return None
    assert isinstance(model, DecoderModel), "the options refuse adapters of others"
    dtype = model.dtype if lora.lora_dtype == "auto" else getattr(torch, lora.lora_dtype)
    max_tokens = config.scheduler.max_num_batched_tokens
    targets = LoraTargets(model, lora.target_modules)
    sizes = (lora.max_loras, lora.max_lora_rank, max_tokens)
    return CpuLora(targets, *sizes, dtype, group)


def make_head(model: Model, num_threads: int) -> CpuHead | None:
    """Make what computes the head behind pooling; None: the model has none."""
    if not isinstance(model, DecoderModel) or model.head is None:
        return None
    return CpuHead(model.head, model.config.hidden_size, num_threads)


def arithmetic_of(loaded: LoadedModel) -> tuple[str, bool]:
    """Return the dtype name that the products of a loaded model round activations to, and whether
    they use AMX; torch computes those of a module of transformers."""
    if not isinstance(loaded.model, DecoderModel):
        return dtype_name(loaded.model.dtype), False
    activations = activation_dtype(loaded.load, loaded.dtype_name, loaded.packed)
    return activations, uses_tiles(loaded.load, activations)


def describe_products(loaded: LoadedModel) -> tuple[str, str]:
    """Return the dtype name that the products of layers round activations to, and by what they are
    computed, for display."""
    activations, in_tiles = arithmetic_of(loaded)
    if not isinstance(loaded.model, DecoderModel):
        return activations, "torch"
    if activations == "int16" and in_tiles and loaded.load.rounding != "int8":
        activations = "bfloat16"  # int16 is for the LM head alone
    return activations, instruction_of(activations, in_tiles)


def make_program(
    config: EngineConfig,
    loaded: LoadedModel,
    cache: CpuKVCache,
    batch: StepTables,
    num_threads: int,
    lora: CpuLora | None = None,
    group: Group | None = None,
) -> Program:
    """Make the program of a loaded model.

    Args:
        config: the engine's configuration.
        loaded: the model; the addresses of its weights must not change.
        cache: the KV cache.
        batch: the block tables of the batch.
        num_threads: the number of threads that compute.
        lora: what `make_lora` returned.
        group: the group of which this process computes a part of the model.
    """
    model, max_tokens = loaded.model, config.scheduler.max_num_batched_tokens
    if isinstance(model, DecoderModel):
        activations, in_tiles = arithmetic_of(loaded)
        if group is not None and group.num_stages > 1:
            size = config.cache.block_size
            return CpuPipeline(
                model, cache, batch, size, max_tokens, num_threads, activations, in_tiles, group
            )
        return program.CpuProgram(
            model, cache, batch, max_tokens, num_threads, activations, in_tiles, lora, group
        )
    from shmllm.models.transformers_impl.model import TransformersModel
    from shmllm.worker.cpu.transformers_program import CpuTransformersProgram

    assert isinstance(model, TransformersModel), "there are two kinds of models"
    return CpuTransformersProgram(model, cache, batch, max_tokens, num_threads)
