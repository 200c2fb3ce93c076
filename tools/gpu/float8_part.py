"""A part of gpu_check: decodes of one model with FP8 keys and values.

In a rehearsal the CPU stores them in int8, which has one byte for each, too.
"""

from __future__ import annotations

from typing import Any

from gpu.engine_run import start_engine
from gpu.figures import Figures
from gpu.settings import Settings

KV_ITEMSIZE = 1


def run(settings: Settings, figures: Figures, size: str) -> None:
    shape = settings.shape(size)
    kept = "int8" if settings.rehearsal else "fp8"
    with start_engine(settings, size, kv_cache_dtype=kept) as engine:
        figures.put("start", engine.start)
        decode: dict[str, Any] = {}
        for batch in sorted(settings.batches)[-2:]:
            found = engine.decode(batch)
            if found["num_steps"]:
                sizes = settings.itemsize, KV_ITEMSIZE
                found["bytes"] = shape.decode_bytes(batch, found["context"], *sizes)
            decode[str(batch)] = found
            figures.put("decode", decode)
