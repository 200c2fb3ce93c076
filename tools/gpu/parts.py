"""The parts of a check: in which order they run, how long each may take, and what runs it.

The most valuable come first: later ones are left out when the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu.shapes import NAMES


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        target: "module:function" of this package, called with (settings, figures, *arguments).
        budget_s: after which it is ended. All together are more than there is: most need less.
        asked_only: runs only if it is named.
        interpreted: launches Triton kernels itself, which a rehearsal has Triton interpret.
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
    _engine("8b", 130),  # the first one compiles for the others
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
        "products and attention of a decode step, each by itself",
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
    """The parts of these names, in their order; without names all that need not be asked for.

    Raises:
        ValueError: there is no such part.
    """
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part {unknown[0]!r}; there are {', '.join(known)}")
    return [p for p in PARTS if (p.name in names if names else not p.asked_only)]
