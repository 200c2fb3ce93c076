"""A model's forward pass on a GPU, launched eagerly or replayed from captured CUDA graphs.

This module owns the captured graphs, by the dispatcher's sizes. It must not know requests, nor
which mode a step is run with.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Protocol, cast

from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.config.load import DecodeKernel, LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.features import Feature, check_features
from shmllm.models.ops import Ops
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport, capture_graphs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.fused_ops import FusedOps
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, GraphDispatcher
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.kv_dtype import check_kv_dtype
from shmllm.worker.gpu.logits_ops import GpuLogitsOps
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.ops import GpuOps, call_now
from shmllm.worker.gpu.persistent_decoder import PersistentDecoder, reason_against, tile_of
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph
from shmllm.worker.gpu.row_products import RowProducts, is_whole
from shmllm.worker.gpu.weights_ahead import weights_ahead
from shmllm.worker.loading import Progress
from shmllm_kernels.gpu.attention import MAX_HEAD_DIM
from shmllm_kernels.gpu.configs import ROWS_OF_PRODUCTS
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.latent_attention import MAX_RANK
from shmllm_kernels.gpu.many_rows import LEAST_ROWS

UNSUPPORTED = {Feature.LAYER_QK_NORM, Feature.DIVIDED_ENCODER}
"""What the kernels cannot compute."""
NOT_FLOAT8 = {Feature.INDEXER, Feature.COMPRESSED}
"""What FP8 keys and values have no kernels for."""


def check_model(
    config: ModelConfig, load: LoadConfig, dtype: str, packed: Collection[str] = ()
) -> None:
    """Raise EngineStartError if the GPU has no kernels for a model with weights of a dtype."""
    if load.rounding is not None:
        raise EngineStartError(
            f"quantization={load.rounding!r} is for the CPU: leave it out, or start with "
            "device='cpu'"
        )
    if load.cpu_instructions != "auto":
        raise EngineStartError(f"cpu_instructions={load.cpu_instructions!r} is for the CPU")
    if load.decode_kernel == "persistent":
        reason = reason_against(config, bool(packed))
        if reason is not None:
            raise EngineStartError(
                f"decode_kernel='persistent' is not possible for {config.architecture}: {reason}; "
                "leave it out"
            )
    if load.activation_dtype not in ("auto", dtype):
        raise EngineStartError(
            f"activation_dtype={load.activation_dtype!r} is for the CPU: on a GPU activations have "
            "the dtype of the weights"
        )
    check_kv_dtype(load, dtype)
    check_features(config, "the GPU", UNSUPPORTED)
    if load.has_float8_cache:
        check_features(config, f"kv_cache_dtype={load.kv_cache_dtype!r}", NOT_FLOAT8)
    _check_widths(config)


def _check_widths(config: ModelConfig) -> None:
    """Raise EngineStartError if heads are too wide for the kernels."""
    widest = max((max(each.head_dim, each.value_head_dim) for each in config.attentions), default=0)
    if any(each.rank > MAX_RANK for each in config.latent_attentions):
        raise EngineStartError(
            f"latents of more than {MAX_RANK} elements are too large for the GPU's attention: "
            "start with device='cpu'"
        )
    for compressed in config.compressed_attentions:
        if compressed.head_dim > MAX_RANK or compressed.head_dim % 2:
            raise EngineStartError(
                f"keys of {compressed.head_dim} elements are no even number of at most {MAX_RANK}, "
                "which the GPU's attention takes: start with device='cpu'"
            )
    if widest > MAX_HEAD_DIM:
        raise EngineStartError(
            f"heads of {widest} elements are too large for the GPU's attention, "
            f"which takes {MAX_HEAD_DIM}: start with device='cpu'"
        )


def auto_dtype(checkpoint: str | None) -> str:
    """Return the meaning of dtype="auto": the dtype of the checkpoint, or bfloat16."""
    return checkpoint or "bfloat16"


class Program(Protocol):
    """Computes a model's steps."""

    def capture(self, on_progress: Progress | None = None) -> CaptureReport:
        """Warm up, and capture what graphs there are.

        Args:
            on_progress: called with (sizes captured, sizes in all).

        Raises:
            EngineStartError: a graph cannot be captured, or there is not enough memory.
        """
        ...

    @property
    def embeds(self) -> Tensor:
        """Where embeddings that a prompt gives are written between `begin` and `run`, [max_tokens,
        hidden]."""
        ...

    def begin(self) -> None:
        """Launch the beginning of a step, or of `compute_logits`. The ranks of a group meet in it,
        and get the tokens that rank 0 has sampled."""
        ...

    def run(
        self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the step whose inputs `GpuInputs` has, padded to the descriptor's sizes.

        Args:
            mode: the mode that the dispatcher chose: NONE, PIECEWISE or FULL.
            descriptor: the sizes that the dispatcher chose. NONE accepts captured sizes, too.
            max_query_len: the largest number of tokens of a request in the step.

        Returns:
            The hidden states after the final norm, [tokens, hidden], and the logits of the tokens
            that get a sample, [samples, vocab], both padded and in the model's dtype. If no token
            gets a sample there may be no logits. The next step may overwrite both.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] float32, of some hidden states that `run` returned,
        [rows, hidden]. Those of the other ranks of a group are nowhere but on rank 0."""
        ...


class GpuProgram:
    """The forward pass and its captured graphs; see `Program`.

    Args:
        model: the model; the addresses of its weights must not change.
        cache: the KV cache.
        inputs: the inputs of each step.
        buffers: the activations; ``hidden`` may be filled with embeddings before a step.
        device: the device.
        dispatcher: decides what to capture.
        lora: the adapters of the step; None: there are none.
        meetings: launches the meetings of the ranks of a group; None: the process is alone.
        decode_kernel: the option of this name.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
        dispatcher: GraphDispatcher,
        lora: GpuLora | None = None,
        meetings: NoMeetings | None = None,
        decode_kernel: DecodeKernel = "auto",
    ) -> None:
        self._meetings = meetings = meetings or NoMeetings()
        self._model = model
        self._inputs = inputs
        self._buffers = buffers
        self._device = device
        self._dispatcher = dispatcher
        where = device.torch_device
        rotates_apart = dispatcher.has_piecewise_decodes
        self._ops = GpuOps(
            *(model.config, cache, inputs, buffers, where, lora, meetings, rotates_apart),
            weights_ahead(model, where),
        )
        self._row_products = RowProducts(where, lora)
        self._fused = FusedOps(self._ops, buffers, self._row_products)
        self._persistent: PersistentDecoder | None = None
        is_wanted = decode_kernel == "persistent" or (
            decode_kernel == "auto" and tile_of(model, where).is_default
        )
        is_alone = lora is None and not meetings.are_needed
        has_decodes = not rotates_apart and dispatcher.mode.mixed_mode is not CudaGraphMode.FULL
        if (
            is_wanted
            and is_alone
            and has_decodes
            and not reason_against(model.config, model.has_packed)
        ):
            self._persistent = PersistentDecoder(model, cache, inputs, buffers, where)
        self._hidden = buffers.results
        self._full: dict[BatchDescriptor, PiecewiseGraph] = {}
        self._piecewise: dict[int, PiecewiseGraph] = {}

    def warm_up(self) -> None:
        """Run each variant of a step once, so that its kernels are compiled and loaded: a capture
        cannot do that, and requests should not wait for it."""
        max_tokens, max_requests = len(self._buffers.hidden), self._buffers.max_requests
        has_packed = self._model.has_packed
        shapes = self._ops.variants(max_tokens, max_requests, has_packed)
        shapes += [descriptor for _, descriptor in self._dispatcher.captures()]
        kinds = (True, False) if self._inputs.looks_within_items else (True,)
        for descriptor, looks_ahead in product(shapes, kinds):
            self._inputs.idle(descriptor, looks_ahead)
            self.begin()
            self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)
        counts = [1, MAX_ROWS]
        if has_packed:
            counts += [MAX_ROWS + 1, *ROWS_OF_PRODUCTS[1:]]
        if self._ops.products.has_many(LEAST_ROWS):
            counts.append(LEAST_ROWS)
        most = len(self._buffers.logits)  # for more rows at a time no memory was left
        for count in counts if self._model.config.lm_head else ():
            if count <= most:
                self.begin()
                self.compute_logits(self._buffers.normed[:count])  # of prompts

    def capture(self, on_progress: Progress | None = None) -> CaptureReport:
        captures = self._dispatcher.captures()
        return capture_graphs(
            self._device, captures, self.warm_up, self._capture, "the model", on_progress
        )

    @property
    def embeds(self) -> Tensor:
        found = self._meetings.embeds
        return self._buffers.embeds if found is None else found

    def begin(self) -> None:
        self._meetings.begin(self._inputs.last_tokens)

    def run(
        self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int
    ) -> tuple[Tensor, Tensor]:
        if mode is CudaGraphMode.FULL:
            self._full[descriptor].replay()
            hidden = self._hidden[: descriptor.num_tokens]
            return hidden, self._buffers.logits[: descriptor.num_samples]
        self._ops.begin(descriptor, max_query_len)
        if mode is CudaGraphMode.PIECEWISE:
            self._piecewise[descriptor.num_tokens].replay()
            hidden = self._hidden[: descriptor.num_tokens]
        else:
            hidden = self._forward(descriptor)
        if not self._inputs.num_samples or not self._model.config.lm_head:
            return hidden, self._buffers.logits[:0]
        return hidden, self._compute_sample_logits(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        width = self._model.config.vocab_size if self._meetings.has_rest else 0
        logits = hidden.new_empty(len(hidden), width, dtype=self._buffers.logits.dtype)
        return self._model.logits(self._logits_ops(logits), hidden).float()

    def _compute_sample_logits(self, hidden: Tensor) -> Tensor:
        rows = self._ops.gather_samples(hidden)
        buffers = self._buffers
        logits, *memory = (
            each[: len(rows)] for each in (buffers.logits, buffers.transformed, buffers.exact)
        )
        return self._model.logits(self._logits_ops(logits, *memory), rows)

    def _logits_ops(self, logits: Tensor, *memory: Tensor) -> GpuLogitsOps:
        head, transform = self._model.embedding.head, self._model.transform
        is_fused = len(logits) <= MAX_ROWS and head is not None and is_whole(head.weight)
        is_fused &= transform is None or is_whole(transform.dense.weight)
        products = self._row_products if is_fused else self._ops.products
        return GpuLogitsOps(logits, products, self._meetings, *memory)

    def _forward(self, descriptor: BatchDescriptor) -> Tensor:
        """Launch the layers of a step. Returns the hidden states, [tokens, hidden]."""
        if self._persistent is not None and self._persistent.takes(descriptor):
            residual = self._model.embed(self._ops)
            self._persistent.run(residual, descriptor)
            return self._model.finish(self._ops, None, residual)
        if self._ops.is_fused:
            hidden = cast(Tensor, self._fused.value(self._model.forward(cast(Ops, self._fused))))
            assert hidden.data_ptr() == self._hidden.data_ptr(), "a replay returns that"
            return hidden
        return self._model.forward(self._ops)

    def _capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
        graph = PiecewiseGraph(self._device)
        is_full = mode is CudaGraphMode.FULL
        launch = call_now if is_full else graph.call
        self._inputs.idle(descriptor)
        self._ops.begin(descriptor, descriptor.num_tokens, launch)
        graph.begin()
        hidden = self._forward(descriptor)
        if is_full:
            if self._model.config.lm_head:
                self._compute_sample_logits(hidden)
            self._full[descriptor] = graph
        else:
            self._piecewise[descriptor.num_tokens] = graph
        graph.end()
        return graph
