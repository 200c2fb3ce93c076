"""The forward pass of a module of transformers on a CPU: torch computes it, all but attention.

Attention runs in the compiled kernels, on the KV cache. torch may sum the elements of a product in
an order that depends on the number of rows, so a request's bits depend on what runs beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.transformers_impl.interface import attending
from shmllm.models.transformers_impl.model import TransformersModel
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.step_inputs import StepInputs
from shmllm.worker.transformers_attention import PagedAttention
from shmllm_kernels.cpu import KernelProgram


class CpuTransformersProgram:
    """Runs a module on each step's tokens. Its attributes are those of `make_program.Program`.

    Args:
        model: the model.
        cache: the KV cache.
        batch: the block tables of the batch.
        max_tokens: the largest number of tokens in a step.
        num_threads: the number of threads that compute.
    """

    deterministic = False

    def __init__(
        self,
        model: TransformersModel,
        cache: CpuKVCache,
        batch: StepTables,
        max_tokens: int,
        num_threads: int,
    ) -> None:
        self.observe: Observe | None = None
        self._model = model
        max_requests = batch.block_tables.shape[1]
        divisions = {Division.of(each) for each in model.config.attentions}
        self.inputs = CpuInputs(
            max_tokens, max_requests, divisions, cache.num_groups, batch.max_samples
        )
        self.buffers = CpuBuffers(model.config, max_tokens, batch.max_samples)
        self._kernels = KernelProgram(num_threads)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._kernels, Products(self._kernels, None), model.config, self.buffers, self.inputs,
            cache, batch.block_tables,
        )  # fmt: skip
        self._recorded: dict[int, tuple[range, Tensor]] = {}
        for layer in model.layers.values():
            rows, begin = self.buffers.product(layer.spec.in_width), len(self._kernels)
            out = self._ops.attend(rows, layer)
            self._recorded[layer.layer] = range(begin, len(self._kernels)), out
        self._attend = PagedAttention(model.layers, self.buffers.product, self._run)

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Compute the step whose inputs are in `self.inputs`; see `Program.run`."""
        num_tokens = len(inputs.token_ids)
        token_ids = torch.from_numpy(self.inputs.token_ids[:num_tokens])
        positions = torch.from_numpy(self.inputs.positions[:num_tokens])
        with attending(self._attend):
            hidden = self._model.hidden(token_ids, positions, self._embeds(token_ids))
        rows = hidden[torch.from_numpy(inputs.sample_tokens)]
        return hidden.float(), self.compute_logits(rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] float32, of some hidden states that `run` returned,
        [rows, hidden]."""
        return self._model.logits(hidden.to(self._model.dtype)).float()

    levels: Tensor | None = None
    routed: Tensor | None = None

    @property
    def embeds(self) -> Tensor:
        """See `make_program.Program`."""
        return self.buffers.embeds

    def _embeds(self, token_ids: Tensor) -> Tensor | None:
        """Return the embeddings of a step's tokens if prompts gave some of them."""
        given = token_ids < 0
        if not given.any():
            return None
        embeds = self._model.embed(token_ids.clamp(min=0))
        own = self.buffers.embeds[: len(token_ids)].to(embeds.dtype)
        return torch.where(given[:, None], own, embeds)

    def _run(self, rows: Tensor, layer: AttentionHeads) -> Tensor:
        kernels, out = self._recorded[layer.layer]
        self._kernels.replay(kernels, self.observe)
        return out[: len(rows)]
