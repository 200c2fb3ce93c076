"""The `shmllm` command: its subcommands, and the exit code and message of each kind of error.

Exit codes: 0 done, 1 some requests failed, 2 usage or environment, 3 the engine died, or aborted or
refused requests, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from shmllm.cli.bench import bench
from shmllm.cli.chat.command import chat
from shmllm.cli.embed import embed
from shmllm.cli.engine import engine
from shmllm.cli.generate import generate
from shmllm.cli.interrupts import EXIT_INTERRUPTED, Interrupted
from shmllm.cli.ipc import ipc
from shmllm.cli.kv import kv
from shmllm.cli.models import models
from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_USAGE
from shmllm.cli.plugins import plugins
from shmllm.cli.quantize import quantize
from shmllm.cli.score import score
from shmllm.cli.streams import drop_unwritten, quiet_closed_pipe, replace_streams
from shmllm.cli.top import top
from shmllm.cli.trace import trace
from shmllm.cli.transcribe import transcribe
from shmllm.errors import EngineDeadError, EnginePausedError, ShmLLMError
from shmllm.version import __version__


class Commands(click.Group):
    """The commands, each of which ends with 0 if the reader of stdout has closed it (`| head`)."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with quiet_closed_pipe():
            return super().make_context(*args, **extra)
        raise click.exceptions.Exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        with quiet_closed_pipe():
            return super().invoke(ctx)
        return 0


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shmllm")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Run LLM inference on one machine, over shared memory.

    \b
    shmllm generate "def fibonacci(n):"
    shmllm chat
    shmllm generate --help
    """


cli.add_command(generate)
cli.add_command(chat)
cli.add_command(chat, "run")
cli.add_command(embed)
cli.add_command(score)
cli.add_command(bench)
cli.add_command(engine)
cli.add_command(ipc)
cli.add_command(kv)
cli.add_command(models)
cli.add_command(plugins)
cli.add_command(quantize)
cli.add_command(top)
cli.add_command(trace)
cli.add_command(transcribe)


def main() -> None:
    """Runs the `shmllm` command and exits with its exit code."""
    replace_streams()
    try:
        code = _run(debug="--debug" in sys.argv[1:2])
    finally:
        drop_unwritten()
    sys.exit(code)


def _run(debug: bool) -> int:
    """Runs the command; returns its exit code.

    Args:
        debug: whether exceptions leave this function.
    """
    try:
        status = cli.main(prog_name="shmllm", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (KeyboardInterrupt, click.exceptions.Abort) as error:
        click.echo("interrupted", err=True)
        cause = error.__cause__ if isinstance(error, click.exceptions.Abort) else error
        return cause.exit_code if isinstance(cause, Interrupted) else EXIT_INTERRUPTED
    except (ShmLLMError, OSError, TypeError) as error:
        if debug or (isinstance(error, TypeError) and "unknown option" not in str(error)):
            raise
        click.echo(f"shmllm: {_one_line(error)}", err=True)
        has_engine = not isinstance(error, EngineDeadError | EnginePausedError)
        return EXIT_USAGE if has_engine else EXIT_ENGINE_ENDED
    return status if isinstance(status, int) else 0


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        return "standard output is closed"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "the current directory does not exist any more"
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (error.filename and str(error.filename), error.strerror)))
    text = str(error.args[0]) if error.args and isinstance(error, ShmLLMError) else str(error)
    return " ".join(text.split())
