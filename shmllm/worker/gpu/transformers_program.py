"""The forward pass of a module of transformers on a GPU: torch computes it, all but attention.

Attention runs in our kernels, on the KV cache. Nothing is captured: the module's own code runs in
every step.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.models.transformers_impl.interface import attending
from shmllm.models.transformers_impl.model import TransformersModel
from shmllm.worker.batch import EMBEDDED, SAMPLED_FOR_ROW
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.loading import Progress
from shmllm.worker.transformers_attention import PagedAttention


class GpuTransformersProgram:
    """Runs a module on each step's tokens; see `program.Program`.

    Args:
        model: the model.
        cache: the KV cache.
        inputs: the inputs of each step.
        buffers: the activations; ``hidden`` may be filled with embeddings before a step.
        device: the device.
    """

    def __init__(
        self,
        model: TransformersModel,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._buffers = buffers
        self._device = device
        self._ops = GpuOps(model.config, cache, inputs, buffers, device.torch_device)
        self._attend = PagedAttention(model.layers, buffers.product, self._ops.attend)

    def capture(self, on_progress: Progress | None = None) -> CaptureReport:
        began = time.monotonic()
        max_tokens, max_requests = len(self._buffers.hidden), self._buffers.max_requests
        for descriptor in self._ops.variants(max_tokens, max_requests, False):
            self._inputs.idle(descriptor)
            self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)
        self._device.synchronize()
        return CaptureReport(time.monotonic() - began, 0, 0)

    @property
    def embeds(self) -> Tensor:
        return self._buffers.hidden

    def begin(self) -> None:
        pass

    def run(
        self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int
    ) -> tuple[Tensor, Tensor]:
        assert mode is CudaGraphMode.NONE, "there are no graphs"
        self._ops.begin(descriptor, max_query_len)
        step, num_tokens = self._inputs.step, descriptor.num_tokens
        given = step.token_ids[:num_tokens]
        last_tokens = self._inputs.last_tokens[(SAMPLED_FOR_ROW - given).clamp(min=0)]
        token_ids = torch.where(given <= SAMPLED_FOR_ROW, last_tokens, given).clamp(min=0)
        embeds = self._embeds(given, token_ids) if self._inputs.has_embeds else None
        with attending(self._attend):
            hidden = self._model.hidden(token_ids, step.positions[:num_tokens], embeds)
        if not self._inputs.num_samples:
            return hidden, self._buffers.logits[:0]
        return hidden, self._model.logits(self._ops.gather_samples(hidden))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden).float()

    def _embeds(self, given: Tensor, token_ids: Tensor) -> Tensor:
        """Return the embeddings of a step's tokens, of which prompts gave some."""
        embeds = self._model.embed(token_ids)
        own = self._buffers.hidden[: len(token_ids)]
        return torch.where((given == EMBEDDED)[:, None], own, embeds)
