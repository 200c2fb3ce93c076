"""Runs `shmllm transcribe`: where transcripts are written, and in which form."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED
from shmllm.cli.session import CommandSession

if TYPE_CHECKING:
    from shmllm.frontend.audio.sound import Sound
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.transcription import Transcript

Found = list["Transcript | None"]
Write = Callable[["LLM", Sequence["Target"], Sequence[Any]], Found]
"""Makes the transcripts of sounds, (samples, rate) each, that go to some targets; None for one that
has failed, of which stderr says why."""

SECONDS_AT_ONCE = 7200
"""Sounds of about so many seconds are in memory at a time; a second takes 64 kB."""


@dataclass(frozen=True)
class Target:
    """Where a transcript goes.

    Attributes:
        source: the path of the sound.
        path: the path of the transcript; None: stdout.
        form: one of `transcribe.FORMATS`.
        is_one: whether there are no others.
    """

    source: str
    path: Path | None
    form: str
    is_one: bool


def make_targets(
    files: Sequence[str], target: str | None, form: str | None, overwrite: bool
) -> list[Target]:
    """Where the transcripts of files go.

    Args:
        files: the paths of the sounds.
        target: the option --output.
        form: the option --format.
        overwrite: whether files may exist.

    Raises:
        click.UsageError: a sound does not exist, or a transcript cannot be written.
    """
    from shmllm.cli.transcribe import FORMATS

    for file in files:
        if os.path.isdir(file):
            raise click.UsageError(f"{file} is a folder: pass its files, such as {file}/*.wav")
        if not os.path.isfile(file):
            raise click.UsageError(f"there is no file {file}")
    is_one = len(files) == 1
    if target is None:
        return [Target(file, None, form or FORMATS[0], is_one) for file in files]
    if is_one and not os.path.isdir(target):
        ending = Path(target).suffix.removeprefix(".")
        if form is None and ending not in FORMATS:
            known = ", ".join(f".{each}" for each in FORMATS)
            raise click.UsageError(f"{target}: name it with an ending ({known}), or pass --format")
        found = [Target(files[0], Path(target), form or ending, is_one)]
    else:
        form = form or FORMATS[0]
        names = [f"{Path(file).stem}.{form}" for file in files]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise click.UsageError(f"two files would be {Path(target) / twice[0]}: rename one")
        pairs = zip(files, names, strict=True)
        found = [Target(file, Path(target) / name, form, is_one) for file, name in pairs]
    for each in found:
        _check(each, overwrite)
    return found


def _check(target: Target, overwrite: bool) -> None:
    assert target.path is not None, "it is a file"
    if target.path.exists() and target.path.samefile(target.source):
        raise click.UsageError(f"{target.path} is the sound itself")
    if target.path.exists() and not overwrite:
        raise click.UsageError(f"{target.path} exists: pass --overwrite, or another --output")
    folder = target.path.parent
    if folder.exists() and not folder.is_dir():
        raise click.UsageError(f"{folder} is a file: transcripts of several sounds need a folder")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as problem:
        raise click.UsageError(f"cannot make {folder}: {problem.strerror}") from problem
    if not os.access(target.path if target.path.exists() else folder, os.W_OK):
        raise click.UsageError(f"{target.path} cannot be written: pass another --output")


def run_transcription(
    targets: Sequence[Target], asked: Mapping[str, Any], session: CommandSession
) -> int:
    """Transcribes sounds and writes the transcripts; returns the exit code.

    Args:
        targets: the sounds, and where their transcripts go.
        asked: the arguments of `LLM.transcribe`.
        session: starts the engine or attaches to it.

    Raises:
        RequestError: the model writes no transcripts, or an argument is wrong.
    """

    def transcribe(llm: LLM, targets: Sequence[Target], sounds: Sequence[Any]) -> Found:
        return [*llm.transcribe(sounds, **asked)]

    return _run(targets, transcribe, session)


def run_alignment(targets: Sequence[Target], texts: Sequence[str], session: CommandSession) -> int:
    """Finds out when the words of texts are said, and writes transcripts with a segment for each;
    returns the exit code.

    Args:
        targets: the sounds, and where their transcripts go.
        texts: what is said in each sound.
        session: starts the engine or attaches to it.

    Raises:
        RequestError: the model is no aligner.
    """
    from shmllm.errors import RequestError

    text_of = dict(zip(targets, texts, strict=True))

    def align(llm: LLM, targets: Sequence[Target], sounds: Sequence[Any]) -> Found:
        try:
            return [*llm.align(sounds, [text_of[target] for target in targets])]
        except RequestError as problem:
            if not targets:
                raise
            if len(targets) == 1:
                click.echo(f"shmllm: {targets[0].source}: {problem}", err=True)
                return [None]
        alone = zip(targets, sounds, strict=True)  # what is wrong with one loses no other
        return [each for target, sound in alone for each in align(llm, [target], [sound])]

    return _run(targets, align, session)


def _run(targets: Sequence[Target], write: Write, session: CommandSession) -> int:
    """Makes transcripts and writes them; returns the exit code.

    Sounds are decoded, transcribed and written in groups, so that memory has a bound, and what is
    written stays whatever happens later. A sound or a transcript that fails is reported on stderr.
    """
    codes = [0]
    with session.open() as llm:
        session.describe_engine(llm)
        write(llm, [], [])  # an error of the arguments is none of a sound
        for group in _groups(llm, targets, codes):
            sounds = [(sound.samples, sound.rate) for _, sound in group]
            found = write(llm, [target for target, _ in group], sounds)
            for (target, _), transcript in zip(group, found, strict=True):
                code = EXIT_FAILED if transcript is None else _finish(target, transcript)
                codes.append(code)
    return max(codes)


def _groups(
    llm: LLM, targets: Sequence[Target], codes: list[int]
) -> Iterator[list[tuple[Target, Sound]]]:
    """The sounds that can be decoded, several at a time; `codes` gets EXIT_FAILED for others."""
    from shmllm.errors import RequestError
    from shmllm.frontend.transcription.sounds import open_sound

    group: list[tuple[Target, Sound]] = []
    for target in targets:
        try:
            sound = open_sound(llm.front_end.items, target.source, target.source)
        except RequestError as problem:
            click.echo(f"shmllm: {problem}", err=True)
            codes.append(EXIT_FAILED)
            continue
        group.append((target, sound))
        if sum(sound.seconds for _, sound in group) >= SECONDS_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _finish(target: Target, transcript: Transcript) -> int:
    """Writes a transcript; returns the exit code, if there were no others."""
    if transcript.error is not None:
        click.echo(f"shmllm: {target.source}: {transcript.error}: parts are missing", err=True)
    try:
        _write(target, transcript)
    except OSError as problem:
        if target.path is None:
            raise
        click.echo(f"shmllm: cannot write {target.path}: {problem.strerror}", err=True)
        return EXIT_FAILED
    return 0 if transcript.error is None else EXIT_ENGINE_ENDED


def _write(target: Target, transcript: Transcript) -> None:
    text = WRITERS[target.form](transcript, target.source)
    if target.path is not None:
        target.path.write_text(text, encoding="utf-8")
        click.echo(f"shmllm: {target.path}", err=True)
        return
    if not target.is_one and target.form != "json":
        click.echo(f"{target.source}:")
    click.echo(text, nl=False)


def as_text(transcript: Transcript, source: str) -> str:
    """A line for each segment."""
    return "".join(f"{segment.text}\n" for segment in transcript.segments)


def as_srt(transcript: Transcript, source: str) -> str:
    """SubRip subtitles."""
    blocks = [
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{segment.text}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(transcript: Transcript, source: str) -> str:
    """WebVTT subtitles."""
    blocks = [
        f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n"
        f"{segment.text.replace('-->', '->')}\n"
        for segment in transcript.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def as_json(transcript: Transcript, source: str) -> str:
    """An object in one line."""
    record = {
        "file": source,
        "language": transcript.language,
        "duration": transcript.duration,
        "text": transcript.text,
        "segments": [
            {"start": each.start, "end": each.end, "text": each.text}
            for each in transcript.segments
        ],
        **({} if transcript.error is None else {"error": transcript.error}),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[Transcript, str], str]] = {
    "txt": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "json": as_json,
}
"""By the names of formats: (the transcript, the path of the sound) -> the content of a file."""


def _clock(seconds: float, point: str) -> str:
    """A time as hours, minutes, seconds and thousandths."""
    thousandths = round(1000 * seconds)
    whole, rest = divmod(thousandths, 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{rest:03}"
