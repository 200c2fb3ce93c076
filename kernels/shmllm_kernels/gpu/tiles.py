"""Reads the table of tile sizes, tiles.json.

The file has one entry for each kernel, device and size, with the measurement or the estimate that
the entry comes from. `tools/gpu_check --write-tiles` rewrites it. This module owns the format of
the file and the rule of choice. It must not know which kernels there are, nor what their tile sizes
mean: `configs` names the kernels and has a dataclass for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

VERSION = 1
"""The version of the file's format. A record of measurements names it as well."""

ANY = "any"
DEVICES = ("sm80", "sm90", "sm100", ANY)
"""The devices of entries, by compute capability: 8.0, 9.x and 10.x; "any" stands for the others,
and for what a device has no entries of its own."""

BESIDE_TILES = ("kernel", "device", "size", "source")
"""What an entry has in the file besides its tile sizes."""
Config = TypeVar("Config")


class TileError(ValueError):
    """The table of tile sizes cannot be read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the table.

    Attributes:
        kernel: the name by which `configs` asks for it.
        device: one of DEVICES.
        size: the largest size that the entry is for; what it counts is a matter of the kernel.
        config: the tile sizes by the names of their dataclass.
        source: the name of one of the table's sources.
    """

    kernel: str
    device: str
    size: int
    config: Mapping[str, int]
    source: str

    @property
    def place(self) -> tuple[str, str, int]:
        """What identifies the entry."""
        return self.kernel, self.device, self.size


@dataclass(frozen=True, slots=True)
class TileTable:
    """The whole table.

    Attributes:
        sources: by name, what the entries come from: {} for an estimate, otherwise card, date and
            versions of a measurement.
        entries: all entries, in the file's order.
    """

    sources: Mapping[str, Mapping[str, str]]
    entries: Sequence[Entry]

    @classmethod
    def read(cls, path: Path) -> TileTable:
        """Returns the table in a file.

        Raises:
            TileError: the file is missing, is no such table, has another version, or has an entry
                of an unknown device, of an unknown source, or twice.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TileError(f"{path} is missing; install shmllm again") from None
        except ValueError as problem:
            raise TileError(f"{path} is no JSON: {problem}") from None
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise TileError(f"{path} is no table of tile sizes of version {VERSION}")
        try:
            entries = [_entry(each) for each in found["entries"]]
            table = cls(found["sources"], entries)
            table._check()
        except (KeyError, TypeError, TileError) as problem:
            raise TileError(f"{path}: {type(problem).__name__}: {problem}") from None
        return table

    def of(self, kernel: str, config: type[Config]) -> Tiles[Config]:
        """Returns the entries of a kernel.

        Args:
            kernel: the kernel's name.
            config: the dataclass of its tile sizes, all of them whole numbers. An entry need not
                have those with a default.

        Raises:
            TileError: there is none that serves all devices, or one has other tile sizes.
        """
        known = fields(config)  # type: ignore[arg-type]
        names = {field.name for field in known}
        needed = {field.name for field in known if field.default is MISSING}
        own = [entry for entry in self.entries if entry.kernel == kernel]
        if not any(entry.device == ANY for entry in own):
            raise TileError(f"no tile sizes of {kernel!r} for the device {ANY!r}")
        for entry in own:
            if not needed <= entry.config.keys() <= names:
                raise TileError(f"{entry.place} has {[*entry.config]}, and needs {sorted(needed)}")
        return Tiles(kernel, {(e.device, e.size): config(**e.config) for e in own})

    @property
    def digest(self) -> str:
        """What differs where other kernels may be chosen, or other places in memory."""
        entries = sorted(f"{entry.place} {sorted(entry.config.items())}" for entry in self.entries)
        return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]

    def _check(self) -> None:
        places = [entry.place for entry in self.entries]
        for entry in self.entries:
            if entry.device not in DEVICES:
                raise TileError(f"{entry.place}: the devices are {', '.join(DEVICES)}")
            if entry.source not in self.sources:
                raise TileError(f"{entry.place}: no source {entry.source!r}")
            if places.count(entry.place) > 1:
                raise TileError(f"{entry.place} is there twice")
            if not all(isinstance(value, int) for value in (entry.size, *entry.config.values())):
                raise TileError(f"{entry.place}: sizes are whole numbers")


class Tiles(Generic[Config]):
    """The tile sizes of a kernel.

    Args:
        kernel: its name.
        by_place: the tile sizes by device and size.
    """

    def __init__(self, kernel: str, by_place: Mapping[tuple[str, int], Config]) -> None:
        self.kernel = kernel
        self._by_place = by_place
        self._sizes = cache(self._merged)

    def sizes(self, device: str) -> Mapping[int, Config]:
        """Returns the tile sizes for a device by the largest size that each is for: the device's
        own, and where it has none of a size, those of any device."""
        return self._sizes(device)

    def best(self, device: str, size: int) -> Config:
        """Returns the tile sizes for a device and a size: the entry of the smallest size that is
        not below it, or else the entry of the largest."""
        sizes = self._sizes(device)
        return sizes[min((most for most in sizes if most >= size), default=max(sizes))]

    @property
    def devices(self) -> frozenset[str]:
        """The devices that have entries of their own, ANY included."""
        return frozenset(device for device, _ in self._by_place)

    def device_of(self, device: str, size: int) -> str:
        """Returns which device's entry a device has of exactly this size."""
        return device if (device, size) in self._by_place else ANY

    def _merged(self, device: str) -> dict[int, Config]:
        return {
            size: config
            for wanted in (ANY, device)
            for (own, size), config in self._by_place.items()
            if own == wanted
        }


def _entry(found: Mapping[str, Any]) -> Entry:
    config = {name: value for name, value in found.items() if name not in BESIDE_TILES}
    return Entry(**{name: found[name] for name in BESIDE_TILES}, config=config)
