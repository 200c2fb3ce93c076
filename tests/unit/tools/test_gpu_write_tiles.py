"""Measured tile sizes are written into the table, and only those that may be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.record import SCHEMA, make_record
from gpu.table import markdown
from gpu.write_tiles import MARGIN, RefusedRecord, as_json, write_tiles

from shmllm_kernels.gpu.configs import TILES_JSON
from shmllm_kernels.gpu.tiles import VERSION, TileTable

ROOT = Path(__file__).resolve().parents[3]
SOURCE = "h100-2027-01-02"
AFTER = {"block_m": 16, "tile": 32, "num_warps": 8, "num_stages": 7}


def row(**changes: Any) -> dict[str, Any]:
    found = {"kernel": "decode", "device": "sm90", "size": 128, "before": {}, "after": AFTER}
    return found | {"us_before": 100.0, "us_after": 90.0} | changes


def outcome(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = {
        "status": "ok",
        "code": "abc",
        "machine": "NVIDIA H100, 580.1, torch 2.11.0, triton 3.6.0, transformers 5.17.0",
        "figures": {"tiles": {"version": VERSION, "rows": list(rows)}},
    }
    return found | changes


class Written:
    """A copy of the table, and a record beside it."""

    def __init__(self, directory: Path) -> None:
        self.table, self.record = directory / "tiles.json", directory / "gpu-check.json"
        self.table.write_text(TILES_JSON.read_text())

    def write(self, parts: dict[str, Any], **changes: Any) -> list[str]:
        found = {
            "schema": SCHEMA, "rehearsal": False, "date": "2027-01-02 10:00 UTC", "commit": "1234",
            "parts": parts,
        }  # fmt: skip
        self.record.write_text(json.dumps(found | changes))
        return write_tiles(self.record, self.table, lambda code: "abc")

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the lines that are gone and the lines that are new."""
        before, after = (path.read_text().splitlines() for path in (TILES_JSON, self.table))
        return [x for x in before if x not in after], [x for x in after if x not in before]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_the_table_is_written_as_it_is_read() -> None:
    assert as_json(TileTable.read(TILES_JSON)) == TILES_JSON.read_text()


def test_a_better_entry_replaces_its_line(written: Written) -> None:
    lines = written.write({"tune": outcome(row())})
    gone, new = written.changed()
    assert len(gone) == 2  # the last source ends with a comma now
    assert '"size": 128, "block_m": 16, "tile": 64' in gone[1]
    source, entry = (
        json.loads("{" + line.strip(" ,") + "}") for line in (new[1], f'"e": {new[2]}')
    )
    wanted = {"kernel": "decode", "device": "sm90", "size": 128, **AFTER, "source": SOURCE}
    assert entry["e"] == wanted
    versions = "torch 2.11.0, triton 3.6.0"
    assert source[SOURCE] == {
        "card": "NVIDIA H100", "date": "2027-01-02", "versions": versions, "commit": "1234"
    }  # fmt: skip
    tiles = "block_m 16, tile 32, num_warps 8, num_stages 7"
    assert lines == [f"decode sm90 128: {tiles} (100.00 us before, 90.00 us after)"]


def test_a_device_gets_entries_of_its_own_behind_those_of_older_ones(written: Written) -> None:
    written.write({"tune": outcome(row(device="sm100"), row(device="sm100", size=64))})
    _, new = written.changed()
    assert ['"size": 64' in line for line in new[2:]] == [True, False]
    entries = TileTable.read(written.table).entries
    places = [entry.place for entry in entries if entry.kernel == "decode"]
    assert places == sorted(
        places, key=lambda place: (("sm90", "sm100", "any").index(place[1]), place[2])
    )


def test_a_gain_within_the_noise_changes_nothing(written: Written) -> None:
    just = 100.0 * (1 - MARGIN) + 0.1
    lines = written.write({"tune": outcome(row(us_after=just), row(size=64, us_after=110.0))})
    assert all("unchanged" in line for line in lines)
    assert written.table.read_text() == TILES_JSON.read_text()


def test_a_source_without_entries_is_dropped(written: Written) -> None:
    present = TileTable.read(TILES_JSON).entries
    rows = [
        row(kernel=entry.kernel, device=entry.device, size=entry.size, after=dict(entry.config))
        for entry in present
    ]
    written.write({"tune": outcome(*rows)})
    assert list(TileTable.read(written.table).sources) == [SOURCE]


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        ({"tune": outcome(row())}, {"rehearsal": True}, "is a rehearsal's record"),
        ({"tune": outcome(row())}, {"schema": SCHEMA - 1}, f"not {SCHEMA}"),
        ({"tune": outcome(row(), code="xyz")}, {}, r"check out the commit of the record \(1234\)"),
        ({"tune": outcome(row(kernel="nothing"))}, {}, "no kernel 'nothing'"),
        ({"tune": outcome(figures={})}, {}, "no measured tile sizes: run gpu_check --only tune"),
        ({}, {}, "no measured tile sizes"),
        (
            {"tune": outcome(figures={"tiles": {"version": VERSION + 1, "rows": []}})},
            {},
            f"entries of version {VERSION + 1}",
        ),
    ],
)
def test_other_records_are_refused(
    written: Written, parts: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedRecord, match=message):
        written.write(parts, **changes)
    assert written.table.read_text() == TILES_JSON.read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu-h200-tiles.json", "is no record of gpu_check: it has no parts."),
        ("gpu-h200.json", "The record has no measured tile sizes"),
    ],
)
def test_the_command_says_why_it_refuses_the_records_from_before(name: str, message: str) -> None:
    command = [str(ROOT / "tools/gpu_check"), "--write-tiles", str(ROOT / "docs/results" / name)]
    before = TILES_JSON.read_text()
    done = subprocess.run(
        [sys.executable, *command], env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert TILES_JSON.read_text() == before


def test_the_text_of_a_record_shows_measured_tiles_and_no_other_figures_of_that_name() -> None:
    first = outcome(figures={"tiles": {"decodes": {"error": 0.1}}}, seconds=1.0, error=None)
    tuned = outcome(row(before={"block_m": 16, "tile": 64}), seconds=1.0, error=None)
    text = markdown(make_record({"first": first, "tune": tuned}, True, 2.0))
    lines = text[text.index("## Tile sizes") :].splitlines()[2:6]
    assert lines[2:] == ["| decode | sm90 | 128 | 16 64 | 16 32 8 7 | 100 | 90 |", ""]
