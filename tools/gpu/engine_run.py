"""Starts an engine, gives it prompts, and reads its steps from shared memory.

This module uses the public `LLM` and the measuring modules of `shmllm bench`. It must not import
torch, like every front end.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.compile_part import num_cached
from gpu.decode_steps import decode_figures
from gpu.settings import Settings
from gpu.trace import ON_DEVICE, ON_HOST, kernel_table, read_events
from shmllm import LLM, SamplingParams
from shmllm.bench.generation import Measured, run_batch
from shmllm.bench.steps import StepFollower
from shmllm.monitor.find import engine_of_this_process
from shmllm.monitor.sample import Watch

FACTS = (
    "dtype",
    "device",
    "graphs",
    "async_scheduling",
    "num_parameters",
    "weight_bytes",
    "num_blocks",
    "block_size",
    "kv_cache_bytes",
    "max_model_len",
    "load_seconds",
    "warnings",
)


LOADS: dict[str, dict[str, Any]] = {
    "unfiltered": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
}
"""The sampled loads. The logits of random weights are nearly equal, so that top_p has more
candidates than with a trained model: the worst case."""


def greedy(tokens: int) -> SamplingParams:
    """Returns sampling parameters for exactly this many tokens, without text."""
    return _params(tokens, {"temperature": 0})


def _params(tokens: int, options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **options)


class EngineRun:
    """Measures one engine.

    Args:
        llm: the front end of an engine that nothing else uses.
        settings: the sizes of the measurements.
        start: the time of the engine's start, and its facts.

    Attributes:
        llm, start: as given.
    """

    def __init__(self, llm: LLM, settings: Settings, start: dict[str, Any]) -> None:
        engine = engine_of_this_process()
        assert engine is not None
        self._follower = StepFollower(Watch(engine).step_log())
        self.llm = llm
        self._settings = settings
        self._vocab = llm.facts.vocab_size
        self.start = start

    def decode(self, batch: int, seed: int = 0, load: str | None = None) -> dict[str, Any]:
        """Measures the decode steps of a batch at the settings' context.

        Args:
            batch: the number of requests.
            seed: the seed of the prompts.
            load: the name of a sampled load; None: greedy.
        """
        settings = self._settings
        tokens = settings.batches[batch]
        prompts = settings.prompts(batch, settings.context, self._vocab, seed)
        options = LOADS[load] | {"seed": seed} if load else {"temperature": 0}
        measured = self._run(prompts, _params(tokens, options))
        found = decode_figures(measured.all_steps(), batch, settings.context)
        found["whole_run_s"] = measured.seconds[0]
        found["ttft_s"] = sorted(measured.ttft_s)[len(measured.ttft_s) // 2]
        return found

    def prefill(self) -> dict[str, Any]:
        """Measures the time from arrival to first token of one long prompt, after a warm-up."""
        settings = self._settings
        times = []
        for seed in range(settings.prefill_rounds + 1):
            [prompt] = settings.prompts(1, settings.prefill_tokens, self._vocab, seed)
            times += self._run([prompt], greedy(1)).ttft_s
        times = sorted(times[1:])
        return {"tokens": settings.prefill_tokens, "ttft_s": times, "s": times[len(times) // 2]}

    def generate(self, batch: int) -> dict[str, Any]:
        """Measures `generate`, in seconds, for one token and for `compare_tokens` tokens."""
        settings = self._settings
        found: dict[str, Any] = {}
        prompts = settings.prompts(batch, settings.compare_prompt, self._vocab, 0)
        for name, tokens in (("warm_up", 2), ("one_s", 1), ("all_s", settings.compare_tokens)):
            began = time.perf_counter()
            outputs = self.llm.generate(prompts, greedy(tokens), use_tqdm=False)
            found[name] = time.perf_counter() - began
        del found["warm_up"]
        found["first_tokens"] = [output.outputs[0].token_ids[0] for output in outputs]
        return found

    def profile(self, batch: int) -> dict[str, Any]:
        """Profiles the kernels of decode steps, after the prompts of all requests are computed."""
        settings = self._settings
        steps = settings.profiled_steps
        prompts = settings.prompts(batch, settings.context, self._vocab, 1)
        prefill_steps = -(-batch * (settings.context + batch) // settings.prefill_tokens)
        self.llm.start_profile(delay_iterations=prefill_steps + 2, max_iterations=steps)
        try:
            self.llm.generate(prompts, greedy(2 * prefill_steps + steps + 4), use_tqdm=False)
        finally:
            path = self.llm.stop_profile()
        categories = ON_HOST if settings.rehearsal else ON_DEVICE
        return kernel_table(read_events(Path(path)), steps, categories)

    def _run(self, prompts: list[list[int]], params: SamplingParams) -> Measured:
        measured = Measured()
        run_batch(self.llm, self._follower, list(prompts), params, measured)
        return measured


@contextlib.contextmanager
def start_engine(settings: Settings, size: str, **options: Any) -> Iterator[EngineRun]:
    """Starts an engine for the model of that size, and stops it at the end of the block."""
    directory = settings.directory(size)
    given = settings.engine_options(size) | {
        "profiler_config": {"torch_profiler_dir": tempfile.mkdtemp(prefix="gpu-check-trace-")},
        **options,
    }
    began, num_before = time.perf_counter(), num_cached()
    with LLM(str(directory), **given) as llm:
        start: dict[str, Any] = {"ready_s": time.perf_counter() - began}
        start["kernels_compiled"] = num_cached() - num_before
        start |= {name: getattr(llm.facts, name) for name in FACTS if hasattr(llm.facts, name)}
        yield EngineRun(llm, settings, start)
