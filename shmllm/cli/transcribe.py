"""`shmllm transcribe`: what is said in sounds, as text, subtitles or JSON."""

from __future__ import annotations

from typing import Any

import click

from shmllm.cli import drafts
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import (
    engine_options,
    metrics_port_option,
    refuse_options,
    take_engine_options,
)
from shmllm.cli.sampling import read_text
from shmllm.cli.session import CommandSession

EPILOG = """\b
Examples:
  shmllm transcribe -m openai/whisper-small talk.mp3
  shmllm transcribe -m ./whisper talk.mp3 -o talk.srt
  shmllm transcribe -m ./whisper calls/*.wav -o transcripts --format json
  shmllm transcribe -m ./whisper interview.ogg --language de --translate
  shmllm transcribe -m Qwen/Qwen3-ForcedAligner-0.6B talk.mp3 --text talk.txt -o words.vtt

\b
Sounds: WAV, FLAC, Ogg (Vorbis, Opus) and MP3, of any length. Long ones are cut where
  they are quiet, and the parts of all sounds are computed together, about two hours of
  sound at a time, whose transcripts are written then.
Output: with one FILE, --output is a file, whose ending chooses the format; with several
  it is a folder, which gets a file for each. Without it stdout gets the transcripts, of
  several sounds each below its name, or a line for each (json).
  txt   a line for each segment
  srt, vtt   subtitles
  json  an object with `file`, `language`, `duration`, `text` and `segments` (`start` and
        `end` in seconds, `text`)

\b
Exit codes: 0 done, 1 some sounds could not be read or transcripts written, 2 usage or
environment, 3 the engine died, or aborted requests, 130 interrupted, 143 terminated.
"""

FORMATS = ("txt", "srt", "vtt", "json")
_PLAIN = {"language": None, "task": "transcribe", "timestamps": True}


def _read_texts(context: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> Any:
    return tuple(read_text(path, param, context) for path in paths)


@click.command(epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", "target", metavar="PATH", help="A file; or a folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="What is written.  [default: by the ending of --output, or txt]",
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@click.option(
    "--language",
    metavar="CODE",
    help="The language that is spoken, such as de.  [default: found by each beginning]",
)
@click.option("--translate", is_flag=True, help="Write English, whatever is spoken.")
@click.option(
    "--no-timestamps", is_flag=True, help="One segment for each part of up to half a minute."
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    callback=_read_texts,
    help="What is said: a forced aligner finds the times of its words. One for each sound.",
)
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@metrics_port_option
@engine_options
def transcribe(**options: Any) -> int:
    """Write down what is said in sounds, with Whisper or another model that transcribes."""
    with interruptible():
        return run(options)


def run(options: dict[str, Any]) -> int:
    """Runs the command; returns the exit code."""
    from shmllm.cli.transcripts import make_targets, run_alignment, run_transcription

    refuse_options([drafts.OPTION], "is for texts that go on")
    names = ("files", "target", "form", "overwrite")
    files, target, form, overwrite = (options.pop(name) for name in names)
    targets = make_targets(files, target, form, overwrite)
    texts = options.pop("texts")
    if texts and len(texts) != len(files):
        raise click.UsageError(f"there are {len(files)} sounds and {len(texts)} --text")
    asked = {
        "language": options.pop("language"),
        "task": "translate" if options.pop("translate") else "transcribe",
        "timestamps": not options.pop("no_timestamps"),
    }
    if texts and asked != _PLAIN:
        raise click.UsageError("--text is no transcription: leave the options of one out")
    engine = take_engine_options(options)
    session = CommandSession(options["attach"], engine, options["metrics_port"])
    if texts:
        return run_alignment(targets, texts, session)
    return run_transcription(targets, asked, session)
