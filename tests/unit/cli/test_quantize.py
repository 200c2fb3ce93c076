"""`shmllm quantize`: its lines and exit codes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.commands import command
from support.quantize_helpers import writable_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    writable_model("llama", directory, num_hidden_layers=1)
    return directory


def test_it_says_the_sizes_and_the_drift(model: Path, tmp_path: Path) -> None:
    done = command("quantize", str(model), str(tmp_path / "m.gguf"), "--format", "gguf-q8_0")
    assert done.returncode == 0, done.stderr
    sizes, drift = done.stdout.decode().splitlines()
    assert sizes.startswith(f"{tmp_path}/m.gguf: 2.1 -> 0.7 MiB, ")
    assert drift.startswith("drift of 9 rounded tensors: 0.")
    assert " % in " in drift
    assert done.stderr == b""
    again = command("quantize", str(model), str(tmp_path / "m.gguf"), "--format", "gguf-q8_0")
    assert again.returncode == 2
    assert again.stderr.decode().endswith(
        "m.gguf exists; choose another name, or add --overwrite\n"
    )
    source = command(
        "quantize", str(tmp_path / "m.gguf"), str(tmp_path / "x"), "--format", "gguf-f16"
    )
    assert source.returncode == 2
    assert b"m.gguf is a GGUF file, whose weights are rounded already" in source.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["./nothing", "out", "--format", "gguf-q8_0"], "model './nothing' not found"),
        (["tiny", "out", "--format", "gguf-q9"], "'gguf-q9' is not one of"),
        (["tiny", "out"], "Missing option '--format'"),
        (["tiny", "/nowhere/out", "--format", "gguf-q8_0"], "/nowhere does not exist"),
        (["tiny", "/tmp/out.gguf", "--format", "gguf-q8_0"], "no name in llama.cpp"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], reason: str) -> None:
    done = command("quantize", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing(
    number: int, code: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupt(*_: object) -> None:
        seen.extend(each.name for each in tmp_path.iterdir())
        signal.raise_signal(number)

    monkeypatch.setattr("shmllm.quantize.drift.Drift.add", interrupt)
    done = command("quantize", str(model), str(tmp_path / "m.gguf"), "--format", "gguf-q8_0")
    assert (done.returncode, done.stderr.strip()) == (code, b"interrupted")
    assert seen == [".m.gguf.unfinished"]
    assert list(tmp_path.iterdir()) == []
