"""Engines are found by the segments that their processes hold; the test process acts as one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmllm.errors import IpcError
from shmllm.ipc import registry
from shmllm.ipc.client_bell import name_bell
from shmllm.ipc.control import ControlPage
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState, SegmentKind
from shmllm.ipc.stats import Stat
from shmllm.monitor.find import FoundEngine, choose, find_engines, identity_of, named_engines
from shmllm.monitor.record import record_of
from shmllm.monitor.sample import Watch

NAME = f"found-{os.getpid()}"


@pytest.fixture
def control() -> Iterator[Segment]:
    """The control segment of an engine; this process is the engine."""
    with Segment.create(SegmentKind.CONTROL) as control:
        control.take_ownership()
        page = ControlPage(control)
        page.set_state(EngineState.READY)
        page.beat()
        page.set_model("small")
        page.set_stat(Stat.RUNNING, 3)
        yield control


def own_engine() -> FoundEngine | None:
    return next((e for e in find_engines() if e.pid == os.getpid()), None)


def test_a_private_engine_is_found_by_its_descriptors(control: Segment) -> None:
    found = own_engine()
    assert found is not None
    assert found.name is None
    assert found.title == str(os.getpid())
    with found.open() as opened:
        assert opened.nonce == control.nonce


def test_a_process_that_only_holds_a_control_segment_is_no_engine() -> None:
    with Segment.create(SegmentKind.CONTROL):
        assert own_engine() is None


def test_a_named_engine_is_found_with_its_name(control: Segment) -> None:
    path = registry.control_path(NAME)
    assert registry.publish(control, path)
    try:
        found = own_engine()
        assert found is not None
        assert (found.name, found.title) == (NAME, NAME)
        assert choose(find_engines(), NAME) == choose(find_engines(), str(os.getpid())) == found
    finally:
        registry.withdraw(control, path)


def test_a_named_engine_is_found_without_its_process(control: Segment, tmp_path: Path) -> None:
    path = registry.control_path(NAME)
    assert registry.publish(control, path)
    try:
        found = choose(find_engines(proc=tmp_path), NAME)
        assert found is not None
        assert (found.pid, found.path) == (0, path)
        assert found.client_paths() == []
        with Segment.create(SegmentKind.CLIENT) as client:
            client.take_ownership()
            place = registry.claim_place(client, NAME)
            assert found.client_paths() == [registry.client_path(NAME, place)]
            registry.withdraw(client, registry.client_path(NAME, place))
    finally:
        registry.withdraw(control, path)


def test_a_record_has_all_figures_whether_the_engine_runs_is_dead_or_cannot_be_read(
    control: Segment, tmp_path: Path
) -> None:
    found = own_engine()
    assert found is not None
    unreadable = FoundEngine("gone", 0, tmp_path / "gone", (0, 0))
    with Segment.create(SegmentKind.CONTROL) as unowned:
        dead = FoundEngine("left", 0, Path(f"/proc/self/fd/{unowned.fd}"), (0, 0))
        records = [record_of(engine) for engine in (found, dead, unreadable)]
    first, second, third = records
    assert first.keys() == second.keys() == third.keys()
    assert (first["state"], first["model"], first["running"]) == ("ready", "small", 3)
    assert (second["state"], second["pid"]) == ("dead", None)
    assert third["state"].startswith("cannot open")
    assert (third["name"], third["running"], third["clients"]) == ("gone", None, [])
    json.dumps(records)


def test_named_engines_include_dead_ones(control: Segment, tmp_path: Path) -> None:
    path = registry.control_path(NAME)
    assert registry.publish(control, path)
    try:
        assert choose(named_engines(), NAME) == own_engine()
        with Segment.create(SegmentKind.CONTROL) as dead:
            left = registry.control_path(f"{NAME}-dead")
            assert registry.publish(dead, left)
            assert choose(find_engines(), left.name) is None
            listed = choose(named_engines(), left.name)
            assert listed is not None
            assert record_of(listed)["state"] == "dead"
    finally:
        registry.withdraw(control, path)
        registry.sweep(registry.control_path(f"{NAME}-dead"))


def test_no_engine_is_found_in_empty_directories(tmp_path: Path) -> None:
    assert find_engines(proc=tmp_path, directory=tmp_path) == []


def test_an_engine_that_has_ended_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(IpcError, match="cannot open"):
        FoundEngine(None, 1, tmp_path / "gone", (0, 0)).open()


def test_a_sample_contains_the_front_ends(control: Segment) -> None:
    found = own_engine()
    assert found is not None
    watch = Watch(found)
    assert watch.sample().clients == ()
    with Segment.create(SegmentKind.CLIENT) as segment:
        assert [client.state for client in watch.sample().clients] == ["dead"]
        segment.take_ownership()
        (client,) = watch.sample().clients
        assert client.pid == os.getpid()
        assert "pytest" in client.command or "python" in client.command
        assert (client.requests_used, client.outputs_used, client.is_parked) == (0, 0, False)
        assert client.state == "idle"
    watch.close()


def test_a_segment_that_is_only_a_doorbell_is_no_front_end(control: Segment) -> None:
    found = own_engine()
    assert found is not None
    with Segment.create(SegmentKind.CLIENT) as own, Segment.create(SegmentKind.CLIENT) as bell:
        assert len(found.client_paths()) == 2
        name_bell(own, bell, "")
        (path,) = found.client_paths()
        assert identity_of(path) == identity_of(Path(f"/proc/self/fd/{own.fd}"))
        watch = Watch(found)
        (client,) = watch.sample().clients
        assert (client.bell, client.is_parked) == (f"{bell.nonce:x}", None)
        watch.close()


def test_a_sample_changes_no_byte_of_the_segments(control: Segment) -> None:
    found = own_engine()
    assert found is not None
    with Segment.create(SegmentKind.CLIENT) as client:
        before = bytes(control.buffer), bytes(client.buffer[: 2**20])
        watch = Watch(found)
        sample = watch.sample()
        watch.close()
        assert (bytes(control.buffer), bytes(client.buffer[: 2**20])) == before
    assert sample.stats["running"] == 3
    assert (sample.state, sample.model) == ("ready", "small")


def test_an_engine_that_has_ended_is_reported_as_ended(control: Segment) -> None:
    found = own_engine()
    assert found is not None
    watch = Watch(found)
    assert not watch.is_over
    control.close()
    assert watch.is_over
    assert watch.sample().state == "dead"
    watch.close()
