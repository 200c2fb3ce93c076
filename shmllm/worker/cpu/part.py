"""The part of a model that a process computes on a CPU: its weights, its KV cache and its program.

A process that is no rank of a group computes the whole model.
"""

from __future__ import annotations

import torch

from shmllm.config.engine import EngineConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.entries import stored_kv
from shmllm.worker.arena import Arena
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.cache import CpuKVCache, cache_bytes, layout_of, stored_as
from shmllm.worker.cpu.encoded_prefixes import EncodedPrefixes
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.instructions import auto_dtype
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.make_program import (
    Program,
    arithmetic_of,
    check_model,
    make_lora,
    make_program,
)
from shmllm.worker.cpu.memory import HostMemory, keep_freed_memory
from shmllm.worker.cpu.multi_token_prediction import CpuFurtherProgram
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.cpu.roomy_arena import RoomyArena
from shmllm.worker.cpu.row_products import RowProducts
from shmllm.worker.cpu.shared_cache import CpuSharedCache
from shmllm.worker.draft_loading import draft_config, load_draft
from shmllm.worker.group import Group
from shmllm.worker.loading import LoadedModel, Progress, load_model
from shmllm.worker.memory import CacheShape, CacheSize


def _named_blocks(name: str, cache: CpuKVCache, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the blocks of the layers of one model, by name."""
    blocks = {f"{name}.layers.{i}": each for i, each in cache.own_layers(model).items()}
    entries = cache.entries.items()
    return blocks | {f"{name}.layers.{i}.entries": each.blocks for i, each in entries}


class CpuPart:
    """
    Args:
        config: the engine's configuration.
        group: the group of which this process is a rank.
        num_threads: the number of threads that compute in this process.
        on_progress: called with (bytes read, bytes in all) while weights are read.

    Attributes:
        pool: the memory of this process.
        loaded: the model, or the part of it.
        draft: the model that drafts, which rank 0 of a group has; or None.
        kv_cache_dtype: the dtype name of keys and values.
        stored: what they are stored as, see `stored_as`.
        shape: the division of the KV cache.
        kv_cache: the arena of the KV cache, after `build`, as the following.
        cache: the KV cache.
        shared: this process's part of the blocks that engines share, or None.
        lora: the adapters of a step, or None.
        program: computes steps.
        further: computes those of the layer that predicts a further token, or None.
        prefixes: writes what an encoder computes to the KV cache, or None.

    Raises:
        EngineStartError: the model cannot be loaded or divided, or does not fit into the memory.
    """

    kv_cache: Arena
    cache: CpuKVCache
    shared: CpuSharedCache | None = None
    lora: CpuLora | None
    program: Program
    further: CpuFurtherProgram | None = None
    prefixes: EncodedPrefixes | None = None

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        num_threads: int,
        on_progress: Progress | None = None,
    ) -> None:
        keep_freed_memory()
        torch.set_num_threads(num_threads)
        self._config = config
        self._group = group
        self._num_threads = num_threads
        parallel = config.parallel
        num_needing = 1 if group.rank else group.size * parallel.num_starting
        self.pool = HostMemory(group.shard.size * parallel.pool_size, num_needing)
        load = config.load
        divide = group.divide if group.size > 1 else None
        self.loaded = load_model(load, self.pool, auto_dtype, check_model, on_progress, divide)
        self.draft: LoadedModel | None = None
        if group.rank == 0:
            self.draft = load_draft(config, self.loaded, self.pool, auto_dtype, check_model)
        wanted, block_size = load.kv_cache_dtype, config.cache.block_size
        self.kv_cache_dtype = self.loaded.dtype_name if wanted == "auto" else wanted
        _, in_tiles = arithmetic_of(self.loaded)
        self.stored = stored_as(self.kv_cache_dtype, block_size, in_tiles)
        self.shape = CacheShape.of(
            config,
            self.loaded.config,
            lambda heads: layout_of(heads, block_size, self.stored).block_bytes,
            draft_config(config, self.loaded),
        )

    def set_tower_products(self) -> None:
        """Let towers multiply so that their bits do not depend on the number of threads."""
        model = self.loaded.model
        if isinstance(model, DecoderModel) and model.towers:
            multiply = RowProducts(self._num_threads, *arithmetic_of(self.loaded))
            for tower in model.towers.values():
                tower.products.multiply = multiply
                tower.products.keeps_rows_apart = True

    def size_cache(self) -> CacheSize:
        """Return the size of the KV cache that fits, of which all ranks get the smallest."""
        return self.pool.size_cache(self._config.cache, self.shape, self.loaded.max_model_len)

    def build(self, size: CacheSize, batch: StepTables) -> None:
        """Make the KV cache and the program.

        Args:
            size: the size of the cache.
            batch: the block tables.
        """
        num_bytes = cache_bytes(self.shape, size.num_blocks, size.num_states)
        if self._config.shared_kv.num_bytes is None:
            self._make_cache(size, HostArena(num_bytes, "the KV cache"))
        else:
            self._make_shared_cache(size, num_bytes)
        self.lora = make_lora(self._config, self.loaded, self._group)
        self.program = make_program(
            self._config,
            self.loaded,
            self.cache,
            batch,
            self._num_threads,
            self.lora,
            self._group,
        )
        config = self.loaded.config
        if config.num_encoded:
            dtype = self.loaded.model.dtype
            self.prefixes = EncodedPrefixes(config, dtype, self.cache, self._num_threads)
        if self._config.load.further_layers:
            self.further = self._make_further(batch)

    def _make_further(self, batch: StepTables) -> CpuFurtherProgram:
        model, program = self.loaded.model, self.program
        assert isinstance(model, DecoderModel), "the options refuse it for others"
        assert isinstance(program, CpuProgram), "the options refuse it for others"
        common = model, self.cache, batch, program, self._num_threads
        return CpuFurtherProgram(*common, *arithmetic_of(self.loaded), self._group)

    def _make_cache(self, size: CacheSize, arena: Arena) -> None:
        self.kv_cache = arena
        self.cache = CpuKVCache(
            self.loaded.config, self.stored, self.shape, size.num_blocks, arena, size.num_states
        )

    def _make_shared_cache(self, size: CacheSize, num_bytes: int) -> None:
        arena = None
        try:
            if not self._config.copies_hits:
                per_id = self.shape.bytes_per_block + self.shape.bytes_per_state
                arena = RoomyArena(num_bytes, per_id)
                self._make_cache(size, arena)
        except OSError as problem:
            if self._config.shared_kv.reads == "in_place":
                raise EngineStartError(
                    "shared_kv_cache_reads='in_place' is not possible: the system refuses the "
                    f"addresses ({problem.strerror}); pass 'copy', or raise the limit of virtual "
                    "memory (ulimit -v)"
                ) from problem
            arena = None
        if arena is None:
            self._make_cache(size, HostArena(num_bytes, "the KV cache"))
        self.shared = CpuSharedCache(self.cache.buffers, arena, self._group, self._num_threads)
        self.pool.counts_shared = False  # what other engines have computed is none of its memory

    def layers_by_name(self) -> dict[str, torch.Tensor]:
        """Return the blocks, [num_blocks, block_bytes] uint8, of each layer with keys and values of
        its own, and of its entries; first those of the model."""
        model = self.loaded.config
        found = _named_blocks("model", self.cache, model)
        if self.draft is not None:
            view = self.cache.of_draft(self.draft.config, len(stored_kv(model)))
            found |= _named_blocks("draft", view, self.draft.config)
        return found

    def copy_states(self, inputs: CpuInputs) -> None:
        """Copy the blocks of states that the inputs of a step name."""
        for source, target in inputs.state_copies:
            self.cache.copy_state(source, target)
