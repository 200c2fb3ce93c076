"""Where `shmllm transcribe` writes, and what becomes of transcripts that cannot be written."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_USAGE
from shmllm.cli.transcripts import make_targets, run_transcription
from shmllm.outputs.transcription import Segment, Transcript


class Session:
    """A session whose engine writes these transcripts."""

    def __init__(self, transcripts: list[Transcript]) -> None:
        self._llm = SimpleNamespace(transcribe=lambda sources: transcripts)

    @contextmanager
    def open(self) -> Any:
        yield self._llm

    def describe_engine(self, llm: Any) -> None:
        assert llm is self._llm


def said(text: str, error: str | None = None) -> Transcript:
    return Transcript("en", 1.0, [Segment(0.0, 1.0, text)], error)


def sounds_in(folder: Path) -> list[str]:
    for name in ("a.wav", "b.wav"):
        (folder / name).write_bytes(b"RIFF")
    return [str(folder / name) for name in ("a.wav", "b.wav")]


def run(folder: Path, transcripts: list[Transcript], spoiled: str | None = None) -> int:
    targets = make_targets(sounds_in(folder), str(folder / "texts"), None, overwrite=False)
    if spoiled is not None:
        (folder / "texts" / spoiled).mkdir()
    session: Any = Session(transcripts)
    return run_transcription(targets, {}, session)


def test_a_file_that_cannot_be_written_loses_no_other(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, [said("one"), said("two")], spoiled="a.txt") == EXIT_USAGE
    assert (tmp_path / "texts/b.txt").read_text() == "two\n"
    assert "a.txt: Is a directory" in capsys.readouterr().err


def test_parts_that_are_missing_are_reported(tmp_path: Path, capsys: Any) -> None:
    found = [said("one", "the engine aborted a request"), said("two")]
    assert run(tmp_path, found) == EXIT_ENGINE_ENDED
    assert (tmp_path / "texts/a.txt").read_text() == "one\n"
    assert "a.wav: the engine aborted a request: parts are missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "output", "message"),
    [
        (["{}"], None, r"is a folder: pass its files"),
        (["{}/a.wav", "{}/b.wav"], "{}/a.wav", "is a file: transcripts of several"),
        (["{}/a.wav"], "{}/none/there/a.srt", "cannot make .*: No such file"),
        (["{}/a.wav"], "{}/locked/a.srt", "a.srt cannot be written"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    output: str | None,
    message: str,
) -> None:
    sounds_in(tmp_path)
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))  # also for root
    given = [file.format(tmp_path) for file in files]
    target = None if output is None else output.format(tmp_path)
    with pytest.raises(click.UsageError, match=message):
        make_targets(given, target, None, overwrite=False)
