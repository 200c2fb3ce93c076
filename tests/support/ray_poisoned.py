"""examples/ray_data.py with a row that no engine survives.

    python ray_poisoned.py INPUT.jsonl DIRECTORY

The row's `id` is in the variable POISON. Each batch with it leaves a line in DIRECTORY/deaths.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_data.py"

example = runpy.run_path(str(EXAMPLE))
Completer: Any = example["Completer"]


class Poisoned(Completer):  # type: ignore[misc]
    """The example's actor, whose engine dies of one row."""

    poison = os.environ["POISON"]
    deaths = f"{sys.argv[2]}/deaths"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.poison in batch["id"]:
            with open(self.deaths, "a") as deaths:
                deaths.write("death\n")
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in children:  # the engine
                os.kill(int(pid), signal.SIGKILL)
        return super().__call__(batch)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main = example["main"]
    main.__globals__["Completer"] = Poisoned
    main()
