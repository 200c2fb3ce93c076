"""A part of gpu_check: decodes of one and of a few requests of a model of another family."""

from __future__ import annotations

from typing import Any

from gpu.compile_part import compile_ahead
from gpu.engine_run import start_engine
from gpu.families import FAMILIES
from gpu.figures import Figures
from gpu.settings import Settings


def run(settings: Settings, figures: Figures, name: str) -> None:
    figures.put("compile", compile_ahead(settings, [name]))
    family, batches = FAMILIES[name], settings.few_batches
    with start_engine(settings, name) as engine:
        figures.put("start", engine.start)
        decode: dict[str, Any] = {}
        for batch in batches:
            found = engine.decode(batch)
            if found["num_steps"]:
                sizes = batch, found["context"], settings.itemsize
                found["bytes"] = family.decode_bytes(*sizes)
            decode[str(batch)] = found
            figures.put("decode", decode)
        figures.put("profile", {str(batch): engine.profile(batch) for batch in batches})
