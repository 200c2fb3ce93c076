"""The table of tile sizes: how it is read, and which entries it has."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shmllm_kernels.gpu import configs, row_configs
from shmllm_kernels.gpu.configs import TILES_JSON
from shmllm_kernels.gpu.tiles import VERSION, TileError, Tiles, TileTable

FIRST_SOURCES = ("estimate", "h200-2026-11-26")
"""The sources of the first table. `FIRST` says nothing of an entry that was measured again."""
FIRST: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {
    "DECODE": {
        ("sm90", 16): (16, 64, 2, 5), ("sm90", 64): (16, 64, 2, 5), ("sm90", 80): (16, 64, 4, 3),
        ("sm90", 128): (16, 64, 4, 3), ("sm90", 256): (16, 32, 4, 5), ("sm90", 512): (16, 16, 4, 5),
        ("any", 64): (16, 64, 4, 5), ("any", 128): (16, 32, 4, 5), ("any", 256): (16, 16, 4, 5),
        ("sm80", 128): (16, 32, 4, 5), ("sm100", 512): (16, 16, 4, 5),
    },
    "SPLIT_DECODE": {
        ("sm90", 64): (16, 64, 2, 3), ("sm90", 128): (16, 128, 4, 5), ("sm90", 256): (16, 32, 4, 5),
        ("any", 64): (16, 64, 4, 5), ("sm100", 128): (16, 32, 4, 5),
    },
    "PREFILL": {
        ("sm90", 64): (128, 64, 8, 5), ("sm90", 128): (128, 64, 8, 5),
        ("sm90", 256): (128, 32, 8, 5), ("sm90", 512): (64, 16, 8, 5),
        ("any", 64): (64, 64, 4, 5), ("any", 128): (128, 32, 8, 5), ("any", 512): (16, 16, 4, 5),
    },
    "LATENT": {
        ("sm90", 16): (16, 32, 4, 5), ("sm90", 20): (32, 32, 8, 5), ("sm90", 128): (64, 32, 8, 5),
        ("any", 16): (16, 16, 4, 5), ("any", 128): (32, 16, 8, 5),
    },
    "LATENT_FLOAT32": {("sm90", 16): (16, 16, 4, 3), ("any", 128): (16, 16, 4, 3)},
    "PRODUCT": {
        ("sm90", 0): (16, 64, 128, 4, 3), ("sm90", 17): (64, 128, 64, 4, 4),
        ("sm90", 65): (128, 128, 64, 8, 4), ("sm90", 1000): (128, 128, 64, 8, 4),
        ("any", 16): (16, 64, 64, 4, 4), ("any", 64): (64, 64, 64, 4, 4),
        ("any", 129): (128, 128, 32, 8, 4),
    },
    "PRODUCT_FLOAT32": {("sm90", 1): (16, 32, 32, 4, 3), ("any", 17): (32, 64, 32, 4, 3)},
    "PACKED_PRODUCT": {
        ("any", 16): (16, 32, 256, 4, 4), ("any", 17): (64, 64, 128, 4, 3),
        ("sm90", 65): (128, 64, 64, 8, 3),
    },
    "PACKED_PRODUCT_FLOAT32": {("any", 1): (16, 32, 64, 4, 3), ("any", 65): (32, 64, 64, 4, 3)},
    "SINGLE_ROW": {
        ("any", 64): (4, 1024, 2), ("any", 2048): (4, 1024, 2), ("any", 2049): (4, 512, 4),
        ("any", 8192): (4, 1024, 8), ("any", 14_336): (2, 1024, 4), ("any", 20_000): (2, 1024, 4),
    },
    "SINGLE_ROW_TALL": {("any", 2048): (4, 1024, 2), ("any", 8192): (4, 1024, 2)},
    "PACKED_ROW": {("any", 0): (4, 1024, 4), ("any", 20_000): (4, 1024, 4)},
}  # fmt: skip
"""By kernel, device and size, the tile sizes that the first table has, and that the module had
before there was a file."""

TABLE = TileTable.read(TILES_JSON)


@dataclass(frozen=True)
class Tile:
    wide: int
    num_warps: int


def entry(**changes: Any) -> dict[str, Any]:
    found = {"kernel": "k", "device": "any", "size": 64, "wide": 8, "num_warps": 4, "source": "s"}
    return found | changes


TABLES = vars(configs) | vars(row_configs)


def read(directory: Path, *entries: dict[str, Any], **changes: Any) -> TileTable:
    path = directory / "tiles.json"
    path.write_text(
        json.dumps({"version": VERSION, "sources": {"s": {}}} | changes | {"entries": entries})
    )
    return TileTable.read(path)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_entries_are_those_from_before_the_file(name: str) -> None:
    tiles: Tiles[Any] = TABLES[name]
    sources = {each.place: each.source for each in TABLE.entries}
    for (device, size), wanted in FIRST[name].items():
        known = tiles.sizes(device)
        most = min((each for each in known if each >= size), default=max(known))
        if sources[tiles.kernel, tiles.device_of(device, most), most] in FIRST_SOURCES:
            found = astuple(tiles.best(device, size))
            assert found[: len(wanted)] == wanted, (device, size)
            assert not any(found[len(wanted) :]), "what the file did not have yet"


def test_all_kernels_of_the_table_are_chosen_from() -> None:
    known = {tiles.kernel for tiles in TABLES.values() if isinstance(tiles, Tiles)}
    assert {each.kernel for each in TABLE.entries} == known


def test_measured_entries_name_the_card_the_date_and_the_versions() -> None:
    measured = {name: of for name, of in TABLE.sources.items() if name != "estimate"}
    assert measured
    for source in measured.values():
        assert {"card", "date", "versions"} <= source.keys()
    assert set(TABLE.sources) == {each.source for each in TABLE.entries}


def test_the_smallest_sufficient_size_of_the_device_is_chosen(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        entry(size=128, wide=16),
        entry(size=64, wide=8),
        entry(size=64, device="sm90", wide=1),
        entry(size=32, device="sm90", wide=2),
    )
    tiles = table.of("k", Tile)
    found = [tiles.best("any", size).wide for size in (1, 64, 65, 128, 4096)]
    assert found == [8, 8, 16, 16, 16]
    found = [tiles.best("sm90", size).wide for size in (32, 33, 64, 65, 4096)]
    assert found == [2, 1, 1, 16, 16]
    assert tiles.best("sm100", 1) == Tile(8, 4)
    assert tiles.device_of("sm90", 64) == "sm90"
    assert tiles.device_of("sm90", 128) == tiles.device_of("sm100", 64) == "any"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "sm70"}, "the devices are sm80, sm90, sm100, any"),
        ({"source": "nobody"}, "no source 'nobody'"),
        ({"size": "64"}, "sizes are whole numbers"),
        ({"num_warps": 4.0}, "sizes are whole numbers"),
        ({}, "is there twice"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TileError, match=message) as error:
        read(tmp_path, entry(), entry(**{"kernel": "other"} | changes if changes else {}))
    assert "tiles.json" in str(error.value)


def test_other_tile_sizes_than_the_kernels_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TileError, match="needs"):
        read(tmp_path, entry(height=1)).of("k", Tile)
    with pytest.raises(TileError, match="no tile sizes of 'k' for the device 'any'"):
        read(tmp_path, entry(device="sm90")).of("k", Tile)


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TileError, match="is missing; install shmllm again"):
        TileTable.read(tmp_path / "tiles.json")
    with pytest.raises(TileError, match="of version 1"):
        read(tmp_path, version=VERSION + 1)
    with pytest.raises(TileError, match="KeyError: 'source'"):
        read(tmp_path, {name: value for name, value in entry().items() if name != "source"})
    (tmp_path / "tiles.json").write_text("{")
    with pytest.raises(TileError, match="is no JSON"):
        TileTable.read(tmp_path / "tiles.json")


def test_choices_have_the_dtypes_entries() -> None:
    for key in configs.DEVICE_KEYS:
        half, single = (
            (configs.product_entry(key, 1, dtype), configs.packed_entry(key, 1, dtype))
            for dtype in (torch.bfloat16, torch.float32)
        )
        assert half == (configs.PRODUCT.best(key, 1), configs.PACKED_PRODUCT.best(key, 1))
        assert single[0] == configs.PRODUCT_FLOAT32.best(key, 1)
        assert single[1] == configs.PACKED_PRODUCT_FLOAT32.best(key, 1)


def test_the_digest_is_that_of_what_is_chosen() -> None:
    """Where an entry comes from, and its line in the file, change nothing."""
    table = TileTable.read(TILES_JSON)
    *entries, last = (replace(entry, source="estimate") for entry in table.entries)
    assert replace(table, entries=[last, *entries]).digest == table.digest
    other = replace(last, config={**last.config, "kib": last.config["kib"] + 1})
    assert replace(table, entries=[*entries, other]).digest != table.digest
    assert replace(table, entries=entries).digest != table.digest


@dataclass(frozen=True)
class Limited(Tile):
    most: int = 0


def test_an_entry_need_not_have_what_has_a_default(tmp_path: Path) -> None:
    tiles = read(tmp_path, entry(), entry(size=128, most=7)).of("k", Limited)
    assert tiles.best("any", 64) == Limited(8, 4, 0)
    assert tiles.best("any", 128) == Limited(8, 4, 7)
    with pytest.raises(TileError, match="needs"):
        read(tmp_path, entry(other=1)).of("k", Limited)
