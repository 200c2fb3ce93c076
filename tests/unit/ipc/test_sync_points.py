"""Each SYNC POINT label marks both a store and the load that pairs with it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from shmllm import ipc


def test_every_label_marks_a_store_and_a_load() -> None:
    counts: Counter[str] = Counter()
    for path in Path(ipc.__path__[0]).glob("*.py"):
        for labels in re.findall(r"# SYNC POINT: ([a-z, ]+)", path.read_text()):
            counts.update(label.strip() for label in labels.split(","))
    assert set(counts) == {
        "record published",
        "record consumed",
        "slot published",
        "slot released",
        "parked against published",
        "last words",
        "segment initialised",
        "client hello",
        "client accepted",
        "step logged",
        "error logged",
        "stop requested",
    }
    assert min(counts.values()) >= 2, counts
