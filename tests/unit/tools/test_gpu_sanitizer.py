"""Running a case under compute-sanitizer, with programs in its place that print what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import sanitizer
from gpu.sanitizer import ERROR_EXIT, Sanitizer

CLEAN = "echo '========= ERROR SUMMARY: 0 errors'"
WRONG = f"""echo '========= Invalid __global__ read of size 16 bytes'
echo '========= ERROR SUMMARY: 1 error'
exit {ERROR_EXIT}"""
REFUSED = "echo '========= Device not supported'; exit 1"


def result(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout_s: float = 20.0):
    program = directory / sanitizer.NAME
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    with Sanitizer(rehearsal=True) as running:
        running.start()
        return running.result(timeout_s)


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "status"), [(CLEAN, "clean"), (REFUSED, "did not run"), ("exit 0", "did not run")]
)
def test_only_a_summary_without_errors_is_clean(tmp_path, monkeypatch, script, status):
    found = result(tmp_path, monkeypatch, script)
    assert found["status"] == status


@pytest.mark.process
def test_an_invalid_access_is_a_failure(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="error: Invalid __global__ read of size 16"):
        result(tmp_path, monkeypatch, WRONG)


@pytest.mark.process
def test_a_case_that_takes_too_long_is_ended_and_is_no_failure(tmp_path, monkeypatch):
    found = result(tmp_path, monkeypatch, "sleep 600", timeout_s=1.0)
    assert found["status"] == "not done in time"


def test_a_machine_without_it_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "PLACES", ())
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with Sanitizer(rehearsal=True) as running:
        running.start()
        assert running.result(1.0) == {"status": "not carried"}


def test_a_carried_one_is_found(tmp_path, monkeypatch):
    program = tmp_path / "nvidia" / "cu13" / "bin" / sanitizer.NAME
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitizer, "PLACES", ())
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert sanitizer.find() == str(program)
