"""A part of gpu_check: measures the engine in each graph mode, without overlapped steps, and with
all layers of a decode in one launch."""

from __future__ import annotations

from typing import Any

from gpu.engine_run import start_engine
from gpu.figures import Figures
from gpu.settings import Settings

# The default comes last, because other parts measure it, too.
VARIANTS = (
    ("FULL_AND_PIECEWISE", False, "launches"),
    ("NONE", True, "launches"),
    ("PIECEWISE", True, "launches"),
    ("FULL_AND_PIECEWISE", True, "persistent"),
    ("FULL_AND_PIECEWISE", True, "launches"),
)


def run(settings: Settings, figures: Figures, size: str) -> None:
    variants: dict[str, Any] = {}
    for mode, overlaps, kernel in VARIANTS:
        graphs = {
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": list(settings.ablation_batches),
        }
        options = {
            "compilation_config": graphs,
            "async_scheduling": overlaps,
            "decode_kernel": "auto" if settings.rehearsal else kernel,
        }
        with start_engine(settings, size, **options) as engine:
            found: dict[str, Any] = {"start": engine.start}
            variants[f"{mode}, {'overlapped' if overlaps else 'in turns'}, {kernel}"] = found
            for seed, batch in enumerate(settings.ablation_batches):
                engine.decode(batch, seed)  # compiles the kernels that no captured graph uses
                found[str(batch)] = engine.decode(batch, seed + 100)
                figures.put("arms", variants)
