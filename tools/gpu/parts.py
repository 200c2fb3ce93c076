"""The table of the parts: their order, their time budgets and their functions.

The most valuable parts come first, because the last ones are skipped when the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu.shapes import NAMES


@dataclass(frozen=True)
class Part:
    """One part of gpu_check.

    Attributes:
        name: the part's name on the command line and in the record.
        target: "module:function" of this package, called with (settings, figures, *arguments).
        budget_s: the time after which the part is stopped. The sum of all budgets exceeds the
            limit of gpu_check, because most parts need less.
        what: a description for the log.
        arguments: the last arguments of the function.
        asked_only: whether the part runs only if it is named.
        interpreted: whether the part launches Triton kernels itself. In a rehearsal Triton's
            interpreter runs them.
    """

    name: str
    target: str
    budget_s: float
    what: str
    arguments: tuple[str, ...] = field(default=())
    asked_only: bool = False
    interpreted: bool = False


def _engine(size: str, budget_s: float) -> Part:
    what = f"{NAMES[size]}: start, decode, prefill, host time, profile"
    return Part(f"engine-{size}", "engine_part:run", budget_s, what, (size,))


def _transformers(size: str, budget_s: float, mode: str = "eager") -> Part:
    suffix = "" if mode == "eager" else f"-{mode}"
    what = f"{NAMES[size]}: transformers' generate with a static cache, {mode}"
    name = f"transformers-{size}{suffix}"
    return Part(name, "transformers_part:run", budget_s, what, (size, mode))


PARTS = (
    Part("environment", "environment:run", 40, "card, versions, bandwidth, GEMM rate, launches"),
    Part("tests", "tests_part:run", 110, "pytest -m gpu tests/gpu"),
    _engine("8b", 130),  # the first engine fills Triton's cache for the others
    _engine("1b", 90),
    _transformers("8b", 50),
    _transformers("1b", 45),
    _engine("4b", 80),
    Part(
        "ablations", "ablations:run", 90, "Llama-3.2-1B: graph modes, overlap on and off", ("1b",)
    ),
    _transformers("4b", 50),
    Part(
        "kernels",
        "kernels_part:run",
        60,
        "products and attention of a decode step, each separately",
        interpreted=True,
    ),
    _transformers("1b", 100, "compiled"),
    Part(
        "tune",
        "tune:run",
        460,
        "entries for kernels/shmllm_kernels/gpu/configs.py",
        asked_only=True,
        interpreted=True,
    ),
)


def select(names: Sequence[str]) -> list[Part]:
    """Returns the parts of these names in the table's order; without names, all parts that are
    not `asked_only`.

    Raises:
        ValueError: a name is unknown.
    """
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part {unknown[0]!r}; the parts are {', '.join(known)}")
    return [p for p in PARTS if (p.name in names if names else not p.asked_only)]
