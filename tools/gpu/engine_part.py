"""A part of gpu_check: start, loads, profile, `generate`, sleep and weight updates of one model."""

from __future__ import annotations

from typing import Any

from gpu.compile_part import num_cached
from gpu.engine_run import LOADS, EngineRun, start_engine
from gpu.figures import Figures
from gpu.memory_run import measure_sleep, measure_updates
from gpu.settings import Settings


def run(settings: Settings, figures: Figures, size: str) -> None:
    shape = settings.shape(size)
    with start_engine(settings, size) as engine:
        figures.put("start", engine.start)
        num_before = num_cached()
        engine.prefill()  # compiles the kernels that no captured graph uses
        figures.put("kernels_compiled_by_the_first_prompt", num_cached() - num_before)
        decode: dict[str, Any] = {}
        for batch in settings.batches:
            found = engine.decode(batch)
            if found["num_steps"]:
                found["bytes"] = shape.decode_bytes(batch, found["context"], settings.itemsize)
            decode[str(batch)] = found
            figures.put("decode", decode)
        figures.put("prefill", _prefill(settings, engine, size))
        _profile(settings, engine, figures)
        _sampled(settings, engine, figures)
        generate: dict[str, Any] = {}
        for batch in settings.compare_batches:
            generate[str(batch)] = engine.generate(batch)
            figures.put("generate", generate)
        figures.put("sleep", measure_sleep(engine.llm, settings))
        figures.put("update", measure_updates(engine.llm, settings, shape))


def _prefill(settings: Settings, engine: EngineRun, size: str) -> dict[str, Any]:
    found = engine.prefill()
    return found | {"flops": settings.shape(size).prefill_flops(settings.prefill_tokens)}


def _profile(settings: Settings, engine: EngineRun, figures: Figures) -> None:
    profile: dict[str, Any] = {}
    for batch in (min(settings.batches), max(settings.batches)):
        profile[str(batch)] = engine.profile(batch)
        figures.put("profile", profile)


def _sampled(settings: Settings, engine: EngineRun, figures: Figures) -> None:
    """Measures the decodes of the sampled loads."""
    sampled: dict[str, Any] = {}
    for load in LOADS:
        by_batch = sampled.setdefault(load, {})
        for batch in settings.sampled_batches:
            by_batch[str(batch)] = engine.decode(batch, load=load)
            figures.put("sampled", sampled)
