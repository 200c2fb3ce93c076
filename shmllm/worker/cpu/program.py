"""A model's forward pass on a CPU, recorded as one kernel program for steps of every shape."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.entries import entry_ropes
from shmllm.models.features import Feature, check_features
from shmllm.models.rope_config import count_axes
from shmllm.models.widths import chosen_of
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu.buffers import SCORED_ROWS, CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.embeddings import record_gather
from shmllm.worker.cpu.group import Meetings, played_by_all
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.instructions import activation_dtype, uses_tiles
from shmllm.worker.cpu.logits_ops import CpuLogitsOps
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.group import Alone, Group, Kind
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu import KernelProgram

UNSUPPORTED = {Feature.LAYER_QK_NORM, Feature.DIVIDED_ENCODER}
"""What the kernels cannot compute."""
NOT_QUANTIZED = {Feature.TRANSPOSED}
"""What cannot be quantized while it is loaded."""


def check_model(
    config: ModelConfig, load: LoadConfig, dtype: str, packed: Collection[str] = ()
) -> None:
    """Raise EngineStartError if there are no kernels for a model with weights of a dtype, of which
    some are packed as these kinds."""
    uses_tiles(load, activation_dtype(load, dtype, packed))
    check_features(config, "the CPU", UNSUPPORTED)
    layers = config.vision.layers_of_levels() if config.vision else ()
    if config.stage.is_first and not all(map(config.stage.has, layers)):
        raise EngineStartError(
            f"images of {config.architecture} reach into its first {layers[-1] + 1} layers, "
            "which the first stage has to have: lower pipeline_parallel_size, or pass "
            "language_model_only=True"
        )
    if load.has_float8_cache:
        raise EngineStartError(
            f"kv_cache_dtype={load.kv_cache_dtype!r} is for a GPU: on a CPU pass 'int8', or "
            "leave it out"
        )
    if load.decode_kernel != "auto":
        raise EngineStartError(
            f"decode_kernel={load.decode_kernel!r} is for a GPU: leave it out on a CPU"
        )
    held = {
        "latents": bool(config.latent_attentions),
        "entries of several tokens": bool(config.compressed_attentions),
        "keys of an indexer": chosen_of(config) is not None,
    }
    unrounded = next((what for what, is_held in held.items() if is_held), None)
    if load.kv_cache_dtype == "int8" and unrounded is not None:
        raise EngineStartError(
            f"kv_cache_dtype='int8' is not possible for {config.architecture}: its cache holds "
            f"{unrounded}, which have no 8-bit kernels; leave it out"
        )
    if load.rounding is not None:
        check_features(config, f"quantization={load.rounding!r}", NOT_QUANTIZED)


class CpuProgram:
    """The recorded forward pass.

    Args:
        model: the model; the addresses of its weights must not change.
        cache: the KV cache.
        batch: the block tables of the batch.
        max_tokens: the largest number of tokens in a step.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX, but for experts.
        lora: the adapters of the step; None: there are none.
        group: the group of which this process computes a part of the model.

    Its attributes are those of `make_program.Program`.
    """

    deterministic = True

    def __init__(
        self,
        model: DecoderModel,
        cache: CpuKVCache,
        batch: StepTables,
        max_tokens: int,
        num_threads: int,
        activation_dtype: str = "float32",
        uses_tiles: bool = False,
        lora: CpuLora | None = None,
        group: Group | None = None,
    ) -> None:
        self._group = group = group or Alone()
        self.observe: Observe | None = None
        max_requests = batch.block_tables.shape[1]
        divisions = {Division.of(each) for each in model.config.all_attentions}
        aheads = {each.ahead for each in model.config.attentions}
        self.inputs = CpuInputs(
            max_tokens, max_requests, divisions, cache.num_groups, batch.max_samples, group, aheads,
            count_axes(model.config.ropes), {rate for _, rate in entry_ropes(model.config)},
        )  # fmt: skip
        self.buffers = CpuBuffers(
            model.config, max_tokens, batch.max_samples, activation_dtype, group, cache.block_size
        )
        self._kernels = KernelProgram(num_threads)
        self._meetings = meetings = Meetings(
            self._kernels, "step", group, model.partial, max_tokens, model.config.hidden_size
        )
        products = Products(self._kernels, self.buffers.rounded, activation_dtype, uses_tiles)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._kernels, products, model.config, self.buffers, self.inputs, cache,
            batch.block_tables, lora, meetings,
        )  # fmt: skip
        self._hidden = model.forward(self._ops)
        if model.config.lm_head:
            self._record_logits(model, num_threads, activation_dtype, uses_tiles)

    def _record_logits(
        self, model: DecoderModel, num_threads: int, activation_dtype: str, uses_tiles: bool
    ) -> None:
        """Record the logits of the tokens that a step samples at, and those of any rows."""
        group, meetings = self._group, self._meetings
        products = Products(self._kernels, self.buffers.rounded, activation_dtype, uses_tiles)
        num_samples = self.inputs.address_of("num_samples")
        rows, logits, own = self.buffers.sampled, self.buffers.logits, model.config.own_tokens
        record_gather(self._kernels, num_samples, self.inputs.sample_tokens, self._hidden, rows)
        ops = CpuLogitsOps(self._kernels, products, num_samples, logits, own, meetings)
        model.logits(ops, rows)
        self._num_scored = group.array("number of scored rows", 1)
        self._scoring = KernelProgram(num_threads)
        self._scoring_meetings = meetings = Meetings(self._scoring, "scoring", group)
        products = Products(self._scoring, self.buffers.rounded, activation_dtype, uses_tiles)
        rows, logits = self.buffers.scored, self.buffers.scored_logits
        num_scored = int(self._num_scored.ctypes.data)
        ops = CpuLogitsOps(self._scoring, products, num_scored, logits, own, meetings)
        model.logits(ops, rows)

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Compute the step whose inputs are in `self.inputs`.

        Args:
            inputs: the same inputs, for their sizes.

        Returns:
            The hidden states of the step's tokens after the final norm, [T, hidden], and the
            logits of its samples, [N, vocab], both float32. The next step overwrites both.
        """
        with played_by_all(self._group, Kind.STEP, self._meetings):
            self.play(Kind.STEP, 0)
        num_samples = len(inputs.sample_tokens)
        return self._hidden[: len(inputs.token_ids)], self.buffers.logits[:num_samples]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] float32, of some hidden states that `run` returned,
        [rows, hidden]."""
        logits = hidden.new_empty(len(hidden), self.buffers.logits.shape[1])
        for begin in range(0, len(hidden), SCORED_ROWS):
            rows = hidden[begin : begin + SCORED_ROWS]
            self._group.settle()
            self.buffers.scored[: len(rows)] = rows
            self._num_scored[0] = len(rows)
            with played_by_all(self._group, Kind.SCORING, self._scoring_meetings):
                self.play(Kind.SCORING, 0)
            logits[begin : begin + len(rows)] = self.buffers.scored_logits[: len(rows)]
        return logits

    @property
    def embeds(self) -> Tensor:
        """See `make_program.Program`."""
        return self.buffers.embeds

    @property
    def routed(self) -> Tensor | None:
        """See `make_program.Program`."""
        return self.buffers.routed

    @property
    def levels(self) -> Tensor | None:
        """See `make_program.Program`."""
        return self.buffers.levels

    def inputs_of(self, slot: int) -> CpuInputs:
        """Return the inputs of the step; a group that divides each layer has one slot."""
        return self.inputs

    def play(self, kind: Kind, slot: int) -> None:
        """Compute this process's part of a step that its group has begun."""
        if kind is Kind.SCORING:
            self._scoring.replay()
        else:
            self._kernels.replay(observe=self.observe)
