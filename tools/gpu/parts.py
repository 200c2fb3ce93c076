"""The table of the parts: their order, their time budgets and their functions.

A run stops at the first part that fails, so the parts that can fail for the simplest reasons come
first, and those that help to mend nothing come last. A new part is one function and one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.families import FAMILIES
from gpu.shapes import NAMES
from gpu.tests_part import SHARDS

ENGINE = ("shmllm", "kernels", "tools/gpu")
TESTS = (*ENGINE, "tests")
TILES = ("kernels", "tools/gpu")


@dataclass(frozen=True)
class Part:
    """One part of gpu_check.

    Attributes:
        name: the part's name on the command line and in the record.
        target: "module:function" of this package, called with (settings, figures, *arguments).
        budget_s: the time after which the part is stopped, unless it was named on the command
            line. In a run of all parts it begins only if that much time is left, or if it is the
            first one.
        what: a description for the log.
        arguments: the last arguments of the function.
        asked_only: whether the part runs only if it is named.
        interpreted: whether the part launches Triton kernels itself. In a rehearsal Triton's
            interpreter runs them.
        needs_kernels: whether the part starts engines whose kernels should be compiled before.
        leaves_files: whether the part's result is on the machine's disk, so that it runs again in
            each command. It has to find out by itself that nothing is left to do.
        code: the files and folders that the part's figures depend on. The figures of an earlier
            run count as long as these have not changed.
    """

    name: str
    target: str
    budget_s: float
    what: str
    arguments: tuple[str, ...] = ()
    asked_only: bool = False
    interpreted: bool = False
    needs_kernels: bool = False
    leaves_files: bool = False
    code: tuple[str, ...] = ENGINE


def _engine(size: str, budget_s: float, asked_only: bool = False) -> Part:
    what = f"{NAMES[size]}: start, loads, profile, sleep, weight updates"
    name = f"engine-{size}"
    return Part(name, "engine_part:run", budget_s, what, (size,), asked_only, needs_kernels=True)


def _transformers(
    size: str, budget_s: float, mode: str = "eager", asked_only: bool = False
) -> Part:
    suffix = "" if mode == "eager" else f"-{mode}"
    what = f"{NAMES[size]}: transformers' generate with a static cache, {mode}"
    name = f"transformers-{size}{suffix}"
    code = ("shmllm/models", "tools/gpu")
    return Part(name, "transformers_part:run", budget_s, what, (size, mode), asked_only, code=code)


def _tuning(name: str, budget_s: float, what: str) -> Part:
    """A part whose winners `--write-tiles` takes."""
    return Part(
        name,
        "search:run",
        budget_s,
        f"tile sizes of {what}",
        (name.replace("-", "_"),),
        interpreted=True,
        code=TILES,
    )


PARTS = (
    Part(
        "first",
        "first_part:run",
        120,
        "a minute of truth: arena, attention, sanitizer, a tiny engine",
        interpreted=True,
    ),
    Part(
        "environment",
        "environment:run",
        60,
        "card, versions, bandwidth, GEMM rate, launches",
        code=("tools/gpu/environment.py", "tools/gpu/clock.py", "tools/gpu/settings.py"),
    ),
    Part(
        "compile",
        "compile_part:run",
        120,
        "the kernels of the engines, in parallel",
        ("8b", "1b"),
        leaves_files=True,
    ),
    _engine("8b", 240),
    _engine("1b", 150),
    Part(
        "float8",
        "float8_part:run",
        120,
        f"{NAMES['8b']}: decodes with FP8 keys and values",
        ("8b",),
        needs_kernels=True,
    ),
    *(
        Part(
            f"family-{name}",
            "family_part:run",
            240,
            f"{family.name}: decodes of one and of eight requests",
            (name,),
        )
        for name, family in FAMILIES.items()
    ),
    *(
        Part(f"tests-{name}", "tests_part:run", 240, f"pytest: {shard.what}", (name,), code=TESTS)
        for name, shard in SHARDS.items()
    ),
    Part(
        "kernels",
        "kernels_part:run",
        90,
        "products and attention of a decode step, each separately",
        interpreted=True,
    ),
    Part(
        "packed",
        "packed_part:run",
        120,
        "products with packed weights of each kind, checked and timed",
        interpreted=True,
    ),
    Part(
        "sharing",
        "shared_kv_part:run",
        60,
        "copies of KV blocks from and to shared memory, checked and timed",
        interpreted=True,
    ),
    Part(
        "ranks",
        "ranks_part:run",
        120,
        "two GPUs, if there are so many: equal tokens, sums beside NCCL's",
        interpreted=True,
    ),
    _tuning("tune-rows", 240, "products of one row, with what is fused with them"),
    _tuning("tune-few-rows", 240, "products of up to eight rows, likewise"),
    _tuning("tune-ahead", 180, "the weights that attention asks the L2 cache for"),
    _tuning("tune-many-rows", 180, "products of 256 rows, beside torch's"),
    _tuning("tune-order", 120, "blocks of the KV cache: which of heads and tokens come first"),
    _tuning("tune-decodes", 180, "the attention of many decodes"),
    _tuning("tune-decoder", 240, "all layers in one launch, beside the launches that it replaces"),
    _tuning("tune", 540, "all other paged attention"),
    _tuning("tune-latents", 180, "latent attention"),
    _tuning("tune-products", 360, "products with experts and with packed weights"),
    _transformers("8b", 90),
    _transformers("1b", 80),
    Part(
        "ablations",
        "ablations:run",
        150,
        "Llama-3.2-1B: graph modes, overlap on and off, all layers in one launch",
        ("1b",),
        needs_kernels=True,
    ),
    _transformers("1b", 120, "compiled"),
    _engine("4b", 150, asked_only=True),
    _transformers("4b", 80, asked_only=True),
)


def select(names: Sequence[str]) -> list[Part]:
    """Returns the named parts in the table's order, and the part `compile` before those that need
    it; without names, all parts that are not `asked_only`.

    Args:
        names: names of parts, or beginnings of names up to a hyphen if no part has the name:
            "tests" names all "tests-...".

    Raises:
        ValueError: a name is unknown.
    """
    if not names:
        return [part for part in PARTS if not part.asked_only]
    named = [part for name in names for part in _named(name)]
    needs_kernels = any(part.needs_kernels for part in named)
    return [part for part in PARTS if part in named or (needs_kernels and part.name == "compile")]


def _named(name: str) -> list[Part]:
    exact = [part for part in PARTS if part.name == name]
    found = exact or [part for part in PARTS if part.name.startswith(f"{name}-")]
    if not found:
        known = ", ".join(part.name for part in PARTS)
        raise ValueError(f"no part {name!r}; the parts are {known}")
    return found
