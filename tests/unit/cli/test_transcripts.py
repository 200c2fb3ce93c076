"""Where `shmllm transcribe` writes, and what becomes of transcripts that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED
from shmllm.cli.transcribe import transcribe
from shmllm.cli.transcripts import make_targets, run_alignment, run_transcription
from shmllm.errors import RequestError
from shmllm.outputs.transcription import Segment, Transcript

RATE = 16000


class Items:
    """Those of a front end, which take a decoded sound as it is."""

    @staticmethod
    def open(modality: str, name: str, content: Any) -> Any:
        assert modality == "audio"
        return content


class Session:
    """A session whose engine writes these transcripts, and remembers how many at a time."""

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._left = [*transcripts]
        self.groups: list[int] = []
        front_end = SimpleNamespace(items=Items())
        self._llm = SimpleNamespace(
            transcribe=self._transcribe, align=self._align, front_end=front_end
        )

    def _transcribe(self, sounds: Sequence[Any]) -> list[Transcript]:
        self.groups.append(len(sounds))
        return [self._left.pop(0) for _ in sounds]

    def _align(self, sounds: Sequence[Any], texts: Sequence[str]) -> list[Transcript]:
        if "wrong" in texts:
            raise RequestError("a text is wrong")
        return [said(text) for _, text in zip(sounds, texts, strict=True)]

    @contextmanager
    def open(self) -> Any:
        yield self._llm

    def describe_engine(self, llm: Any) -> None:
        assert llm is self._llm


def said(text: str, error: str | None = None) -> Transcript:
    return Transcript("en", 1.0, [Segment(0.0, 1.0, text)], error)


def sounds_in(folder: Path) -> list[str]:
    paths = [str(folder / name) for name in ("a.wav", "b.wav", "c.wav")]
    for path in paths:
        soundfile.write(path, np.zeros(RATE), RATE)
    return paths


def run(folder: Path, session: Session, *, spoil: Callable[[Path], Any] = bool) -> int:
    """Transcribes three sounds of a second, after `spoil` has changed the folder."""
    targets = make_targets(sounds_in(folder), str(folder / "texts"), None, overwrite=False)
    spoil(folder)
    given: Any = session
    return run_transcription(targets, {}, given)


def texts_in(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (folder / "texts").iterdir() if path.is_file()}


def test_a_transcript_that_cannot_be_written_loses_no_other(tmp_path: Path, capsys: Any) -> None:
    session = Session([said("one"), said("two"), said("three")])
    code = run(tmp_path, session, spoil=lambda folder: (folder / "texts/a.txt").mkdir())
    assert code == EXIT_FAILED
    assert texts_in(tmp_path) == {"b": "two\n", "c": "three\n"}
    assert "a.txt: Is a directory" in capsys.readouterr().err


def test_a_sound_that_cannot_be_read_loses_no_other(tmp_path: Path, capsys: Any) -> None:
    session = Session([said("one"), said("three")])
    code = run(tmp_path, session, spoil=lambda folder: (folder / "b.wav").write_text("text"))
    assert code == EXIT_FAILED
    assert texts_in(tmp_path) == {"a": "one\n", "c": "three\n"}
    assert "b.wav has an unknown format" in capsys.readouterr().err


def test_parts_that_are_missing_are_reported(tmp_path: Path, capsys: Any) -> None:
    found = [said("one", "the engine aborted a request"), said("two"), said("three")]
    assert run(tmp_path, Session(found)) == EXIT_ENGINE_ENDED
    assert texts_in(tmp_path)["a"] == "one\n"
    assert "a.wav: the engine aborted a request: parts are missing" in capsys.readouterr().err


def test_each_sound_has_its_text_although_another_cannot_be_read(tmp_path: Path) -> None:
    targets = make_targets(sounds_in(tmp_path), str(tmp_path / "texts"), None, overwrite=False)
    (tmp_path / "b.wav").write_text("text")
    session: Any = Session([])
    assert run_alignment(targets, ["one", "two", "three"], session) == EXIT_FAILED
    assert texts_in(tmp_path) == {"a": "one\n", "c": "three\n"}


def test_a_text_that_is_refused_loses_no_other(tmp_path: Path, capsys: Any) -> None:
    targets = make_targets(sounds_in(tmp_path), str(tmp_path / "texts"), None, overwrite=False)
    session: Any = Session([])
    assert run_alignment(targets, ["one", "wrong", "three"], session) == EXIT_FAILED
    assert texts_in(tmp_path) == {"a": "one\n", "c": "three\n"}
    assert "b.wav: a text is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a.txt", "--text", "a.txt"], "there are 1 sounds and 2 --text"),
        (["--text", "a.txt", "--language", "de"], "--text is no transcription"),
        (["--text", "b.txt"], "b.txt: No such file"),
    ],
)
def test_texts_that_do_not_fit(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sounds_in(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    result = CliRunner().invoke(transcribe, ["a.wav", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_sounds_are_in_memory_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written of the first ones stays when the engine dies."""
    monkeypatch.setattr("shmllm.cli.transcripts.SECONDS_AT_ONCE", 2)
    session = Session([said("one"), said("two")])
    with pytest.raises(IndexError):
        run(tmp_path, session)
    assert session.groups == [0, 2, 1]
    assert texts_in(tmp_path) == {"a": "one\n", "b": "two\n"}


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
