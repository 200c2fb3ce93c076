"""The parts of an engine that can sleep, and SleepReport, the result of sleeping or waking up.

The engine and its front ends share these classes. This module must not know how or when memory
is released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntFlag

MIB = 2**20


class SleepState(IntFlag):
    """The parts of an engine that are asleep; 0 means that the engine is awake.

    The statistics word `asleep` has the same bits. There, MISSING means that weights were dropped
    and not all of them have been written again.
    """

    SCHEDULING = 1
    KV_CACHE = 2
    WEIGHTS = 4
    MISSING = 8

    @property
    def tags(self) -> list[str]:
        """The names that `wake_up(tags=...)` takes, in the order in which the parts wake up."""
        return [name for name, part in TAGS.items() if part in self]


TAGS = {
    "weights": SleepState.WEIGHTS,
    "kv_cache": SleepState.KV_CACHE,
    "scheduling": SleepState.SCHEDULING,
}
"""The parts by the names that `wake_up(tags=...)` takes, which are vLLM's."""


@dataclass(frozen=True, slots=True)
class OwnedBytes(Mapping[str, int]):
    """The memory of an engine process in bytes, by purpose; also a mapping from these names.

    Only resident pages count: a page of an arena that was never written counts as 0.

    Attributes:
        weights: the model's weights, in the form that the model computes with.
        kv_cache: the keys and values.
        graphs: the captured CUDA graphs; 0 on a CPU.
        workspaces: the buffers that all steps reuse.
        rest: all other resident memory of the process, including its code and libraries.
    """

    weights: int
    kv_cache: int
    graphs: int
    workspaces: int
    rest: int

    @property
    def total(self) -> int:
        """The sum of all purposes, in bytes."""
        return sum(self.values())

    def __getitem__(self, owner: str) -> int:
        if owner not in OWNERS:
            raise KeyError(owner)
        return int(getattr(self, owner))

    def __iter__(self) -> Iterator[str]:
        return iter(OWNERS)

    def __len__(self) -> int:
        return len(OWNERS)


OWNERS = tuple(field.name for field in fields(OwnedBytes))


@dataclass(frozen=True, slots=True)
class SleepReport:
    """The result of a call of `LLM.sleep`, or of waking up.

    Attributes:
        before: the engine's memory before the call.
        after: the engine's memory after the call.
        asleep: the parts that are asleep now, as the tags that `wake_up` takes.
        num_missing: the number of weights that must be written before the engine can generate.
        num_kept: the number of unfinished requests that continue when the engine is awake.
        seconds: the duration of the call.
    """

    before: OwnedBytes
    after: OwnedBytes
    asleep: tuple[str, ...]
    num_missing: int
    num_kept: int
    seconds: float

    @property
    def freed_bytes(self) -> int:
        """The memory that the call released, in bytes; negative if it allocated memory."""
        return self.before.total - self.after.total

    def to_json(self) -> dict[str, object]:
        """The report as a JSON object, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> SleepReport:
        """The report that `to_json` wrote."""
        before, after, asleep = (values[name] for name in ("before", "after", "asleep"))
        others = {name: values[name] for name in ("num_missing", "num_kept", "seconds")}
        return cls(
            OwnedBytes(**before),  # type: ignore[arg-type]
            OwnedBytes(**after),  # type: ignore[arg-type]
            tuple(asleep),  # type: ignore[arg-type]
            **others,  # type: ignore[arg-type]
        )

    def __str__(self) -> str:
        """The report in one line, for a log."""
        changes = [
            f"{owner} {_mib(self.before[owner])} -> {_mib(self.after[owner])}" for owner in OWNERS
        ]
        done = f"freed {_mib(self.freed_bytes)}"
        if self.freed_bytes < 0:
            done = f"took {_mib(-self.freed_bytes)}"
        return f"{done} MiB in {self.seconds:.3f} s ({', '.join(changes)}); {self.state()}"

    def state(self) -> str:
        """The state of the engine after the call, in words."""
        words = f"asleep: {', '.join(self.asleep)}" if self.asleep else "awake"
        if self.num_missing:
            words += f"; {self.num_missing} {_are(self.num_missing, 'weight')} missing"
        if self.num_kept:
            words += f"; {self.num_kept} {_are(self.num_kept, 'request')} kept"
        return words

    def table(self) -> str:
        """A table of the memory before and after the call, in MiB."""
        rows = [("MiB", "before", "after")]
        rows += [(o, _mib(self.before[o]), _mib(self.after[o])) for o in OWNERS]
        rows.append(("all", _mib(self.before.total), _mib(self.after.total)))
        return "\n".join(f"{name:<10}  {b:>10}  {a:>10}" for name, b, a in rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"


def _are(number: int, noun: str) -> str:
    return f"{noun} is" if number == 1 else f"{noun}s are"
