"""When an engine process collects garbage.

Collecting while torch is imported and a model loaded takes a quarter of that time, and finds
nothing. A collection of the oldest generation looks at every queued request: 220 ms for 100,000 of
them, in the middle of a step.
"""

from __future__ import annotations

import gc

THRESHOLDS = (100_000, 20, 100)
"""With these none of the oldest happens, and the longest of the others takes 12 ms; reference
counts free what steps leave behind."""


def hold() -> None:
    """Collect nothing until `settle`."""
    gc.set_threshold(0)


def keep_imported() -> None:
    """What was imported is never looked at."""
    gc.freeze()


def settle() -> None:
    """All that there is now stays; look at what comes after it, rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
