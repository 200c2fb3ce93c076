"""`shmllm kv` on regions in a directory in place of /dev/shm, in this process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shmllm.cli.ipc import ipc
from shmllm.cli.kv import kv
from shmllm.errors import SegmentError
from shmllm.shared_kv import folder
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import create

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
SECTIONS = (Section(8, 2, 4096), Section(0, 0, 0))


pytestmark = pytest.mark.usefixtures("own_regions")


def make(place: int, key: str = KEY, states: int = 0, **description: object) -> OwnRegion:
    layout = RegionLayout((SECTIONS[0], Section(states, 1, 4096 if states else 0)))
    region = create(folder.make_folder(key), layout, [place])
    values = {"pid": os.getpid(), "began": time.time() - 7200, "name": "tiny", "dtype": "float32"}
    region.describe(values | description)
    return region


def make_ended(place: int, key: str = KEY, hours: float = 0.0, **description: object) -> Path:
    region = make(place, key, **description)
    region.close()
    moment = time.time() - 3600 * hours
    os.utime(region.path, (moment, moment))
    return region.path


@pytest.fixture
def living() -> Iterator[OwnRegion]:
    region = make(0)
    yield region
    region.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(kv, arguments, catch_exceptions=False)


def test_without_a_region_ls_says_how_to_get_one() -> None:
    done = run("ls")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "--shared-kv-cache-bytes 1GiB" in done.stderr
    assert json.loads(run("ls", "--json").stdout) == []


def test_ls_shows_a_line_for_each_region_and_their_sum(living: OwnRegion) -> None:
    living.publish(0, 3, b"k" * 32)
    make_ended(1, hours=50, kv_cache_dtype="float8_e4m3fn")
    header, first, second, total = run("ls").stdout.splitlines()
    assert "states" not in header
    assert first.split()[:9] == [
        KEY,
        "0",
        "tiny",
        "float32",
        "in",
        "use",
        str(os.getpid()),
        "1",
        "/",
    ]
    assert "2.0 h" in first
    assert second.split()[:9] == [
        KEY,
        "1",
        "tiny",
        "float32/float8_e4m3fn",
        "ended",
        "-",
        "0",
        "/",
        "8",
    ]
    assert second.endswith("2.1 d ago")
    assert total.startswith("2 regions, ")
    assert "of it without a living engine" in total


def test_states_have_a_column_if_a_region_has_some() -> None:
    make_ended(0, states=4)
    header, line, _ = run("ls").stdout.splitlines()
    assert "states" in header
    assert "0 / 4" in line
    [record] = json.loads(run("ls", "--json").stdout)
    assert (record["blocks_total"], record["states_total"]) == (8, 4)


def test_damaged_and_foreign_files_are_listed_with_the_reason() -> None:
    directory = folder.make_folder(KEY)
    (directory / "0").write_bytes(b"x")
    (directory / "note").write_bytes(b"x")
    done = run("ls")
    assert done.exit_code == 0
    assert f"{directory}/0 is damaged: it has 1 bytes" in done.stderr
    assert f"{directory}/note is foreign: shmllm gives no file this name" in done.stderr
    assert [each["state"] for each in json.loads(run("ls", "--json").stdout)] == [
        "damaged",
        "foreign",
    ]


def test_gc_removes_old_and_damaged_regions_and_empty_folders() -> None:
    old, recent = make_ended(0, hours=25), make_ended(0, OTHER, hours=1)
    damaged = recent.with_name("5")
    damaged.write_bytes(b"x")
    dry = run("gc", "--dry-run")
    assert [line.split()[2] for line in dry.stdout.splitlines()] == [f"{KEY}/0", f"{OTHER}/5"]
    assert "nothing was removed" in dry.stderr
    assert old.exists()
    done = run("gc")
    assert done.exit_code == 0
    assert "2 regions removed" in done.stderr
    assert "1 region of engines that have ended" in done.stderr
    assert "shmllm kv clear" in done.stderr
    assert recent.exists()
    assert not old.parent.exists()
    assert "nothing to remove" in run("gc").stderr
    assert "1 region removed" in run("gc", "--older-than", "0.5").stderr
    assert not recent.parent.exists()


def test_clear_removes_all_but_what_living_engines_have(living: OwnRegion) -> None:
    ended, other = make_ended(1), make_ended(0, OTHER, name="other")
    done = run("clear")
    assert done.exit_code == 0
    assert "2 regions removed" in done.stderr
    assert f"kept {KEY}/0" in done.stderr
    assert f"pid {os.getpid()}" in done.stderr
    assert living.path.exists()
    assert not ended.exists()
    assert not other.parent.exists()


@pytest.mark.parametrize("which", [OTHER, "other", "/models/else", "else"])
def test_clear_takes_a_key_or_a_model(which: str) -> None:
    kept, gone = make_ended(0), make_ended(0, OTHER, name="other", model="/models/else")
    run("clear", which)
    assert kept.exists()
    assert not gone.exists()
    with pytest.raises(SegmentError, match="see: shmllm kv ls"):
        run("clear", which)


def test_who_looks_for_memory_with_ipc_ls_is_led_to_kv_ls() -> None:
    make_ended(0)
    done = CliRunner().invoke(ipc, ["ls"], catch_exceptions=False)
    assert "see: shmllm kv ls" in done.stderr
