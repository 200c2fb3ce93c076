"""The part of a model that a process computes on a GPU: its weights, its KV cache and its program.

A process that is no rank of a group computes the whole model.
"""

from __future__ import annotations

import torch

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena
from shmllm.worker.draft_loading import draft_config, load_draft
from shmllm.worker.gpu.attention_launches import max_verified
from shmllm.worker.gpu.cache import GpuKVCache, cache_bytes
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_resources import DraftProgram
from shmllm.worker.gpu.encoded_prefixes import EncodedPrefixes
from shmllm.worker.gpu.graph_dispatcher import GraphDispatcher
from shmllm.worker.gpu.group import DeviceGroup
from shmllm.worker.gpu.kv_dtype import unused_scales
from shmllm.worker.gpu.memory import LAUNCHES, MANY_LAUNCHES, DeviceMemory, estimate_graph_bytes
from shmllm.worker.gpu.program import Program, auto_dtype, check_model
from shmllm.worker.gpu.shared_cache import GpuSharedCache, staged_bytes
from shmllm.worker.gpu.step_resources import StepResources
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.items import item_bytes
from shmllm.worker.loading import LoadedModel, Progress, load_model
from shmllm.worker.memory import CacheSize
from shmllm_kernels.gpu.cache_keys import fix_cache_keys

NOT_DETERMINISTIC = (
    "on a GPU deterministic=True fixes how attention splits contexts, but not which kernel "
    "multiplies matrices: the bits of a result may depend on the number of tokens in a step"
)


class GpuPart:
    """
    Args:
        config: the engine's configuration.
        device: the GPU.
        group: the group of which this process is a rank; None: it is alone.
        on_load: called with (bytes read, bytes in all) while weights are read.

    Attributes:
        device: as given.
        pool: the device's memory.
        loaded: the model, or the part of it.
        draft: the model that drafts, which rank 0 of a group has; or None.
        dispatcher: decides which graphs there are, the same on all ranks.
        resources: the objects that compute steps, after `size_cache`.
        staging: the arena through which shared blocks are copied, or None.
        kv_cache: the arena of the KV cache, after `build`, as the following.
        cache: the KV cache.
        shared: the blocks that engines share, or None.
        program: computes steps.
        prefixes: writes what an encoder computes to the KV cache, or None.
        drafting: computes those of a model that drafts, or None.
        captured: the cost of its graphs.

    Raises:
        EngineStartError: the model cannot be loaded or divided, does not fit into the memory, or
            has no kernels for a GPU.
    """

    resources: StepResources
    staging: Arena | None = None
    kv_cache: Arena
    cache: GpuKVCache
    shared: GpuSharedCache | None = None
    program: Program
    prefixes: EncodedPrefixes | None = None
    drafting: DraftProgram | None = None
    captured: CaptureReport

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        group: DeviceGroup | None = None,
        on_load: Progress | None = None,
    ) -> None:
        fix_cache_keys()
        self._config = config
        self._group = group
        self.device = device
        self.pool = DeviceMemory(device)
        divide = None if group is None else group.divide
        load = config.load
        self.loaded = load_model(load, self.pool, auto_dtype, check_model, on_load, divide)
        self.dispatcher = _make_dispatcher(config, self.loaded.config.lm_head)
        self._draft_config = draft_config(config, self.loaded)
        self.draft: LoadedModel | None = None
        if group is None or group.rank == 0:
            self.draft = load_draft(config, self.loaded, self.pool, auto_dtype, check_model)

    @property
    def warnings(self) -> list[str]:
        """What the options or the checkpoint ask for and no GPU does, a sentence each."""
        load = self._config.load
        return [*unused_scales(load), *([NOT_DETERMINISTIC] if load.deterministic else [])]

    def size_cache(self) -> CacheSize:
        """Make the objects that compute steps, and return the size of the KV cache that fits. All
        ranks of a group do this at the same time."""
        loaded, draft = self.loaded, self.draft
        self.resources = resources = StepResources.allocate(
            self._config, loaded, draft, self._draft_config, self.device, self._group
        )
        num_captured = len(self.dispatcher.captures()) * loaded.config.num_layers
        if resources.drafts is not None:
            num_captured += resources.drafts.num_captured
        launches = MANY_LAUNCHES if loaded.config.compressed_attentions else LAUNCHES
        if self._config.shared_kv.num_bytes is not None:
            shape = resources.shape
            num_bytes = staged_bytes(shape.bytes_per_block, shape.bytes_per_state)
            self.staging = self.pool.make_arena(num_bytes, "copies of shared blocks")
        return self.pool.size_cache(
            self._config.cache,
            resources.shape,
            loaded.max_model_len,
            sum(each.weights.resident_bytes for each in (loaded, draft) if each is not None),
            estimate_graph_bytes(num_captured, launches),
            resources.run_largest,
            item_bytes(self._config, loaded),
        )

    def build(self, size: CacheSize, on_capture: Progress | None = None) -> None:
        """Make the KV cache and the program, and capture its graphs. All ranks of a group do this
        at the same time.

        Args:
            size: the size of the cache.
            on_capture: called with (sizes captured, sizes in all).
        """
        loaded, shape = self.loaded, self.resources.shape
        dtype = self.resources.kv_dtype
        num_bytes = cache_bytes(shape, dtype, size.num_blocks, size.num_states)
        self.kv_cache = self.pool.make_arena(num_bytes, "the KV cache")
        self.cache = GpuKVCache(
            loaded.config, dtype, shape, size.num_blocks, self.kv_cache, size.num_states
        )
        if self.staging is not None:
            memory = self.staging.allocate((self.staging.num_bytes,), torch.uint8)
            self.shared = GpuSharedCache(self.cache.sections, memory, self.device)
        self.program = self.resources.make_program(self.cache, self.dispatcher)
        if loaded.config.num_encoded:
            transfers = Transfers(self.device)
            self.prefixes = EncodedPrefixes(loaded.config, self.cache, transfers)
        drafts = self.resources.drafts
        with torch.inference_mode():
            if self.prefixes is not None:
                self.prefixes.warm_up(loaded.dtype)
            self.captured = self.program.capture(on_capture)
            if drafts is not None:
                self.drafting = drafts.make_program(self.cache)
                self.captured += self.drafting.capture()

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        """Launch the copies of blocks of states, each from one to another."""
        for source, target in copies:
            self.cache.copy_state(source, target)


def _make_dispatcher(config: EngineConfig, generates: bool = True) -> GraphDispatcher:
    graphs, seqs = config.graphs, config.scheduler.max_num_seqs
    tokens = config.scheduler.max_num_batched_tokens
    is_ours = config.load.model_impl != "transformers"
    mode = graphs.effective_mode if is_ours else CudaGraphMode.NONE
    if not generates:  # all steps are prompts
        mode = mode.mixed_mode
    made = GraphDispatcher(
        mode,
        graphs.capture_sizes,
        seqs,
        tokens,
        graphs.max_capture_size,
        config.max_drafts,
        max_verified(config.speculative.most_drafted),
    )
    if mode is not CudaGraphMode.NONE and not made.captures():
        raise EngineStartError(
            f"no step can use a graph of cudagraph_capture_sizes {graphs.capture_sizes}: "
            f"{mode.name} with max_num_seqs={seqs} and max_num_batched_tokens={tokens}; "
            "give smaller sizes, or enforce_eager"
        )
    return made
