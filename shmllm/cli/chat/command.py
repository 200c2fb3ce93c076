"""`shmllm chat`: the command, and what connects a chat to a terminal or a pipe and to an engine."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.chat.answer import MAX_TOKENS
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import engine_options, metrics_port_option, take_engine_options
from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED
from shmllm.cli.prompts import (
    chat_template_option,
    reply_options,
    take_reply_options,
    take_tool_choice,
    tool_options,
)
from shmllm.cli.sampling import read_text, sampling_options, take_sampling
from shmllm.cli.session import CommandSession
from shmllm.cli.streams import check_stdout

if TYPE_CHECKING:
    from shmllm.cli.chat.chat import Chat
    from shmllm.cli.chat.conversation import Conversation
    from shmllm.cli.chat.screen import Screen
    from shmllm.cli.chat.stopping import StopKey
    from shmllm.frontend.replies.formats import ToolChoice

WELCOME = "/help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat"
EPILOG = """\b
Examples:
  shmllm chat -m ./my-model --system "Be brief."
  shmllm chat --attach main --temperature 0.7
  shmllm chat -m ./my-model --messages saved.json
  shmllm chat -m ./my-model --tools tools.json --tool-choice required
  echo "Why is the sky blue?" | shmllm chat -m ./my-model

\b
In the chat, /help lists the commands: /system, /reset, /regenerate, /image, /audio, /video,
/detach, /result, /save, /exit.
Ctrl-C ends an answer and Ctrl-D the chat. A line about each answer goes to stderr.

\b
Without a terminal, each line of stdin is a message or a command, answers go to stdout as
they are, and Ctrl-C ends the command.

\b
Exit codes: 0 done, 1 some lines of stdin failed, 2 usage or environment, 3 the engine
died or ended an answer, 130 interrupted, 143 terminated.
"""


@click.command(epilog=EPILOG)
@sampling_options
@click.option("--system", metavar="TEXT", help="System message.")
@click.option(
    "--messages", "source", metavar="FILE", help="Go on with the messages that /save wrote here."
)
@chat_template_option
@tool_options
@reply_options
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@metrics_port_option
@engine_options
def chat(**options: Any) -> int:
    """Talk with a model.

    Each answer sees the whole conversation so far, and is written as it comes. `shmllm run` is the
    same command.
    """
    with interruptible():
        engine = take_engine_options(options)
        replies = take_reply_options(options)
        session = CommandSession(
            options["attach"], engine, options["metrics_port"], replies=replies
        )
        sampling = take_sampling(options)
        choice = take_tool_choice(options, sampling)
        conversation = _opening(options["source"], options["system"])
        template, tools = options["chat_template"], options["tools"]
        return run_chat(session, sampling, conversation, template, tools, choice)


HELP = {
    "temperature": "Sampling temperature; 0 is greedy.  [default: the model's, else 0]",
    "max_tokens": f"Tokens of an answer.  [default: {MAX_TOKENS}]",
    "chat_template": "Chat template in place of the model's.",
}
"""The help of options that are otherwise those of `shmllm generate`."""
for each in chat.params:
    if isinstance(each, click.Option):
        each.help = HELP.get(str(each.name), each.help)


def run_chat(
    session: CommandSession,
    sampling: dict[str, Any],
    conversation: Conversation,
    template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: ToolChoice = None,
) -> int:
    """Chats until the user ends it; returns the exit code.

    Args:
        session: starts the engine or attaches to it.
        sampling: the sampling parameters from the command line.
        conversation: where the chat begins.
        template: the source of a chat template; None takes the model's.
        tools: what the model may call; None for nothing.
        tool_choice: whether it does so; see `LLM.chat`.
    """
    check_stdout()
    from shmllm.cli.chat.answer import Answerer
    from shmllm.cli.chat.chat import Chat
    from shmllm.cli.chat.screen import Screen
    from shmllm.cli.chat.stopping import StopKey

    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    screen, stop = Screen(sys.stdout, sys.stderr), StopKey()
    with session.open() as llm:
        answerer = Answerer(llm, sampling, stop, template, tools, tool_choice)
        answerer.check_template()
        answerer.check_tool_choice()
        answerer.check_items(conversation)
        session.describe_engine(llm)
        talk = Chat(conversation, answerer, screen)
        if is_interactive():
            _talk_in_terminal(talk, screen, stop)
            return 0
        _talk_through_pipe(talk)
        if talk.num_aborted:
            return EXIT_ENGINE_ENDED
        return EXIT_FAILED if talk.num_failed else 0


def is_interactive() -> bool:
    """Whether stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _talk_in_terminal(talk: Chat, screen: Screen, stop: StopKey) -> None:
    from shmllm.cli.chat.terminal import terminal_lines

    screen.note(WELCOME)
    with (
        stop,
        contextlib.closing(terminal_lines(lambda: screen.note("Ctrl-D ends the chat"))) as lines,
    ):
        talk.run(lines)


def _talk_through_pipe(talk: Chat) -> None:
    from shmllm.cli.chat.pipe import plain_lines

    talk.run(plain_lines(sys.stdin.buffer, sys.stderr if sys.stdin.isatty() else None))


def _opening(source: str | None, system: str | None) -> Conversation:
    """The conversation with which a chat begins."""
    from shmllm.cli.chat.conversation import Conversation

    if source is None:
        return Conversation.with_system(system)
    from shmllm.cli.chat.attachments import check_files

    found = Conversation.from_json(read_text(source, None, None), source)
    for remark in check_files(found.messages, source):
        click.echo(f"shmllm: {remark}", err=True)
    return found if system is None else found.under(system)
