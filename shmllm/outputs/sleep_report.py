"""What can sleep of an engine, and what its memory was given for before and after.

Owns the nouns that the engine and its front ends share about sleeping. Must not know how
memory is released, or when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntFlag

MIB = 2**20


class SleepState(IntFlag):
    """What of an engine is asleep; 0 is awake. Also the bits of the statistics word, where
    MISSING says that weights were dropped and have not all been written again."""

    SCHEDULING = 1
    KV_CACHE = 2
    WEIGHTS = 4
    MISSING = 8

    @property
    def tags(self) -> list[str]:
        """What vLLM calls the parts, those that wake up first being first."""
        return [name for name, part in TAGS.items() if part in self]


TAGS = {
    "weights": SleepState.WEIGHTS,
    "kv_cache": SleepState.KV_CACHE,
    "scheduling": SleepState.SCHEDULING,
}
"""What `wake_up(tags=...)` takes."""


@dataclass(frozen=True, slots=True)
class OwnedBytes(Mapping[str, int]):
    """Bytes of memory by whose they are, as far as they are there: a page of an arena that
    nobody wrote takes none.

    Attributes:
        weights: the model's, as they are computed with.
        kv_cache: keys and values.
        graphs: captured CUDA graphs; 0 on a CPU.
        workspaces: buffers that steps reuse.
        rest: all else that the process has resident, its code and libraries included.
    """

    weights: int
    kv_cache: int
    graphs: int
    workspaces: int
    rest: int

    @property
    def total(self) -> int:
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
    """What going to sleep, or waking up, did.

    Attributes:
        before: bytes of each owner.
        after: likewise.
        asleep: what is asleep now, as tags of `wake_up`.
        num_missing: weights that have to be written before anything can be generated.
        num_kept: requests that go on when the engine does.
        seconds: it took.
    """

    before: OwnedBytes
    after: OwnedBytes
    asleep: tuple[str, ...]
    num_missing: int
    num_kept: int
    seconds: float

    @property
    def freed_bytes(self) -> int:
        """Negative where memory was taken."""
        return self.before.total - self.after.total

    def to_json(self) -> dict[str, object]:
        """A JSON object, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> SleepReport:
        before, after, asleep = (values[name] for name in ("before", "after", "asleep"))
        others = {name: values[name] for name in ("num_missing", "num_kept", "seconds")}
        return cls(
            OwnedBytes(**before),  # type: ignore[arg-type]
            OwnedBytes(**after),  # type: ignore[arg-type]
            tuple(asleep),  # type: ignore[arg-type]
            **others,  # type: ignore[arg-type]
        )

    def __str__(self) -> str:
        """One line for a log."""
        changes = [
            f"{owner} {_mib(self.before[owner])} -> {_mib(self.after[owner])}" for owner in OWNERS
        ]
        done = f"freed {_mib(self.freed_bytes)}"
        if self.freed_bytes < 0:
            done = f"took {_mib(-self.freed_bytes)}"
        return f"{done} MiB in {self.seconds:.3f} s ({', '.join(changes)}); {self.state()}"

    def state(self) -> str:
        """What the engine is now, in words."""
        words = f"asleep: {', '.join(self.asleep)}" if self.asleep else "awake"
        if self.num_missing:
            words += f"; {self.num_missing} weights are missing"
        if self.num_kept:
            words += f"; {self.num_kept} requests are kept"
        return words

    def table(self) -> str:
        """A table for people, in MiB."""
        rows = [("MiB", "before", "after")]
        rows += [(o, _mib(self.before[o]), _mib(self.after[o])) for o in OWNERS]
        rows.append(("all", _mib(self.before.total), _mib(self.after.total)))
        return "\n".join(f"{name:<10}  {b:>10}  {a:>10}" for name, b, a in rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"
