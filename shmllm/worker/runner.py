"""Loads a model and executes step plans on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from shmllm.config import UNLIMITED_LOGPROBS, EngineConfig, EngineFacts, LoadConfig
from shmllm.core.plan import Constraint, PromptScores, StepPlan, StepResult
from shmllm.errors import EngineStartError
from shmllm.logprobs import TokenLogprobs
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.registry import create_model
from shmllm.models.weights import load_dummy_weights, load_weights
from shmllm.worker.arena import Arena, CountingAllocator, make_arena
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.cpu_program import CpuProgram, Observe
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.kv_cache import KVCache, cache_bytes
from shmllm.worker.memory import (
    check_weights_fit,
    keep_freed_memory,
    size_kv_cache,
)
from shmllm.worker.memory_owners import MemoryOwners
from shmllm.worker.pooler import Pooler
from shmllm.worker.prompt_embeds import PromptEmbeds, check_prompt_embeds
from shmllm.worker.sampler import Sampler
from shmllm.worker.scoring import score_in_pieces
from shmllm.worker.token_masks import TokenMasks
from shmllm_kernels.cpu.cache_layout import CacheLayout

Progress = Callable[[int, int], None]


def _wanted_length(load: LoadConfig, model: ModelConfig) -> int:
    wanted = load.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise EngineStartError(
            f"max_model_len {wanted:,} exceeds the {model.max_position_embeddings:,} positions "
            f"that the model was made for (max_position_embeddings in {load.directory})"
        )
    return wanted


def _load_model(
    load: LoadConfig, config: ModelConfig, dtype: torch.dtype, on_progress: Progress | None
) -> tuple[DecoderModel, Arena]:
    """The model with its weights, and the arena in which they are."""
    counter = CountingAllocator()
    create_model(config, dtype, counter.take, load.quantization)
    name = load.quantization or str(dtype).removeprefix("torch.")
    check_weights_fit(counter.num_bytes, name)
    arena = make_arena(counter.num_bytes, "the weights", torch.device("cpu"), huge_pages=True)
    model = create_model(config, dtype, arena.take, load.quantization)
    _fill(model, load, on_progress)
    return model, arena


def _fill(model: DecoderModel, load: LoadConfig, on_progress: Progress | None = None) -> None:
    if load.load_format == "dummy":
        load_dummy_weights(model, load.seed)
    else:
        load_weights(model, Path(load.directory), on_progress)


class ModelRunner:
    """A loaded model with its KV cache.

    Args:
        config: what to load, and how much memory and how many rows it may use.
        on_progress: called with (bytes read, bytes in all) while weights are read.

    Attributes:
        memory: what can be given back while the engine sleeps.

    Raises:
        EngineStartError: the model cannot be loaded, or not in this memory.
    """

    def __init__(self, config: EngineConfig, on_progress: Progress | None = None) -> None:
        began = time.monotonic()
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        keep_freed_memory()
        model_config = ModelConfig.from_directory(Path(config.load.directory))
        max_model_len = _wanted_length(config.load, model_config)
        dtype_name = "float32" if config.load.dtype == "auto" else config.load.dtype
        dtype: torch.dtype = getattr(torch, dtype_name)
        torch.set_num_threads(num_threads)
        self._load = config.load
        self._model, weights = _load_model(config.load, model_config, dtype, on_progress)
        layout = CacheLayout(
            model_config.num_kv_heads, model_config.head_dim, config.cache.block_size, dtype_name
        )
        bytes_per_block = model_config.num_layers * layout.block_bytes
        size = size_kv_cache(config.cache, bytes_per_block, max_model_len)
        num_bytes = cache_bytes(layout, model_config.num_layers, size.num_blocks)
        kv_cache = make_arena(num_bytes, "the KV cache", torch.device("cpu"))
        rows = config.scheduler.max_num_seqs
        self._vocab_size = model_config.vocab_size
        self._batch = InputBatch(
            rows, size.max_model_len, config.cache.block_size, self._vocab_size
        )
        self._program = CpuProgram(
            self._model,
            KVCache(layout, model_config.num_layers, size.num_blocks, kv_cache),
            self._batch,
            config.scheduler.max_num_batched_tokens,
            num_threads,
        )
        directory = Path(config.load.tokenizer_directory or config.load.directory)
        self._grammars = GrammarCompiler(directory, model_config.eos_token_ids)
        self._masks = TokenMasks(self._grammars, rows, self._vocab_size)
        self._prompt_embeds = PromptEmbeds()
        self._pooler = Pooler(rows, model_config.hidden_size)
        self._sampler = Sampler(self._batch, config.logprobs.mode)
        workspaces = (self._program.buffers, self._pooler, self._masks)
        self.memory = MemoryOwners(self._model, weights, kv_cache, workspaces)
        self._scores_probabilities = config.logprobs.mode.endswith("logprobs")
        most = config.logprobs.max_logprobs
        self.facts = EngineFacts(
            model_directory=config.load.directory,
            model_type=model_config.architecture,
            dtype=dtype_name,
            num_parameters=sum(v[0].numel() for v in self._model.named_weights().values()),
            vocab_size=model_config.vocab_size,
            eos_token_ids=tuple(model_config.eos_token_ids),
            max_model_len=size.max_model_len,
            block_size=config.cache.block_size,
            num_blocks=size.num_blocks - 1,
            kv_cache_bytes=size.num_blocks * bytes_per_block,
            weight_bytes=weights.num_bytes,
            max_num_seqs=rows,
            num_threads=num_threads,
            wait_policy=config.client.wait_policy,
            load_seconds=time.monotonic() - began,
            max_logprobs=(
                self._vocab_size if most == UNLIMITED_LOGPROBS else min(most, self._vocab_size)
            ),
            scheduling_policy=config.scheduler.policy,
            hidden_size=model_config.hidden_size,
            deterministic=True,
            warnings=(size.warning,) if size.warning else (),
        )

    @property
    def model(self) -> DecoderModel:
        """What computes; its weights may be replaced between two steps."""
        return self._model

    def observe(self, observe: Observe | None) -> None:
        """Have each kernel of a step run inside a context made of its label; None: no more."""
        self._program.observe = observe

    def reload_weights(self, directory: str | None) -> None:
        """Load the weights again as at the start, or from another directory.

        Raises:
            RequestError: they are asleep.
            EngineStartError: they cannot be read; nothing was written.
        """
        self._model.check_awake()
        if directory is None:
            _fill(self._model, self._load)
        else:
            load_weights(self._model, Path(directory))
        self._model.weights_changed(self._model.named_weights())

    def check_embeds(self, embeds: torch.Tensor, length: int) -> torch.Tensor:
        """A prompt's embeddings in the model's dtype; RequestError if they are none."""
        shape = (length, self._model.config.hidden_size)
        return check_prompt_embeds(embeds, shape, self._model.dtype)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, and sample a successor where it asks for one."""
        self._batch.update(plan)
        inputs = self._batch.inputs(plan)
        arrays = self._program.arrays
        arrays.fill(inputs)
        masks = self._masks.begin(plan.constraints)
        self._prompt_embeds.update(plan)
        self._prompt_embeds.lay_over(self._program.buffers.hidden, arrays.token_ids, inputs)
        prepared_ns = time.perf_counter_ns()
        hidden, logits = self._program.run(inputs)
        prompt_logprobs = [self._score_prompt(hidden, inputs, s) for s in plan.prompt_scores]
        vectors = self._pooler(hidden, inputs, plan) if plan.pools else ()
        if not plan.samples:
            computing_ns = prepared_ns, time.perf_counter_ns()
            return StepResult([], None, prompt_logprobs, vectors, computing_ns)
        computing_ns = prepared_ns, time.perf_counter_ns()
        sampled = self._sampler(logits, inputs.sample_rows, inputs.sample_positions, masks)
        self._batch.append(inputs, sampled.token_ids)
        ids = sampled.token_ids.tolist()
        return StepResult(ids, sampled.logprobs, prompt_logprobs, vectors, computing_ns)

    def compile_grammar(self, text: str) -> Future[Callable[[], Constraint]]:
        """What begins an output under this grammar, at once or later."""
        return self._grammars.compile(text)

    def _score_prompt(
        self, hidden: torch.Tensor, inputs: StepInputs, scores: PromptScores
    ) -> TokenLogprobs:
        """A token is scored by the logits that follow the token before it."""
        first_token = int(inputs.first_tokens[scores.index])
        start = int(inputs.positions[first_token])
        begin = first_token + scores.first - 1 - start
        row = inputs.rows[scores.index]
        wanted = self._batch.token_ids[row, scores.first : scores.end].astype(np.int64)
        return score_in_pieces(
            len(wanted),
            self._vocab_size,
            lambda a, b: self._program.compute_logits(hidden[begin + a : begin + b]),
            torch.from_numpy(wanted),
            scores.k,
            self._scores_probabilities,
        )
