"""Part: the engine without graphs, with some, with all, and with steps that do not overlap."""

from __future__ import annotations

from typing import Any

from gpu.engine_run import start_engine
from gpu.figures import Figures
from gpu.settings import Settings

# What an engine does by itself comes last: it is measured elsewhere, too.
ARMS = (
    ("FULL_AND_PIECEWISE", False),
    ("NONE", True),
    ("PIECEWISE", True),
    ("FULL_AND_PIECEWISE", True),
)


def run(settings: Settings, figures: Figures, size: str) -> None:
    arms: dict[str, Any] = {}
    for mode, overlaps in ARMS:
        graphs = {
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": list(settings.ablation_batches),
        }
        options = {"compilation_config": graphs, "async_scheduling": overlaps}
        with start_engine(settings, size, **options) as engine:
            found: dict[str, Any] = {"start": engine.start}
            arms[f"{mode}, {'overlapped' if overlaps else 'in turns'}"] = found
            for seed, batch in enumerate(settings.ablation_batches):
                engine.decode(batch, seed)  # compiles what no graph has
                found[str(batch)] = engine.decode(batch, seed + 100)
                figures.put("arms", arms)
