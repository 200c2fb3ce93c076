"""A part of gpu_check: start, decode, prefill, `generate` and profile of the engine's model."""

from __future__ import annotations

from typing import Any

from gpu.engine_run import EngineRun, start_engine
from gpu.figures import Figures
from gpu.settings import Settings


def run(settings: Settings, figures: Figures, size: str) -> None:
    shape = settings.shape(size)
    with start_engine(settings, size) as engine:
        figures.put("start", engine.start)
        engine.prefill()  # compiles the kernels that no captured graph uses
        decode: dict[str, Any] = {}
        for batch in settings.batches:
            found = engine.decode(batch)
            if found["num_steps"]:
                found["bytes"] = shape.decode_bytes(batch, found["context"], settings.itemsize)
            decode[str(batch)] = found
            figures.put("decode", decode)
        figures.put("prefill", _prefill(settings, engine, size))
        generate: dict[str, Any] = {}
        for batch in settings.compare_batches:
            generate[str(batch)] = engine.generate(batch)
            figures.put("generate", generate)
        profile: dict[str, Any] = {}
        for batch in (min(settings.batches), max(settings.batches)):
            profile[str(batch)] = engine.profile(batch)
            figures.put("profile", profile)


def _prefill(settings: Settings, engine: EngineRun, size: str) -> dict[str, Any]:
    found = engine.prefill()
    return found | {"flops": settings.shape(size).prefill_flops(settings.prefill_tokens)}
