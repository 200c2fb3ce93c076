"""`shmllm chat` in a pseudo-terminal that the test types into, and with a pipe as input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.engines import attached, is_idle, named_engine, slow_steps
from support.programs import CLI, environment
from support.terminals import Terminal, opened_terminal
from support.waiting import PATIENCE_S, join_all, wait_until

from shmllm import LLM, SamplingParams
from shmllm.cli.main import cli

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPT = "> "
FIGURES = re.compile(r"\[(\d+) tokens?, .*? (\d+) of (\d+) prompt tokens cached\]")
ENDLESS = ("--ignore-eos", "--max-tokens", "900")
SHORT = ("--temperature", "0", "--max-tokens", "6")
CTRL_C, CTRL_D, UP, ENTER = b"\x03", b"\x04", b"\x1b[A", b"\r"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine for all chats that do not end it."""
    directory = tmp_path_factory.mktemp("engine")
    with named_engine(directory, allow_callables=True) as (name, _):
        yield name


@pytest.fixture
def llm(engine: str) -> Iterator[LLM]:
    with attached(engine) as llm:
        yield llm


@contextmanager
def chat(engine: str, state: Path, *arguments: str, **size: int) -> Iterator[Terminal]:
    """A chat in a terminal, when it waits for its first line."""
    variables = {"XDG_STATE_HOME": str(state)}
    command = ("chat", "--attach", engine, *arguments)
    with opened_terminal(*command, env=variables, **size) as seen:
        assert seen.shows(waits), seen.text()
        yield seen


def waits(text: str) -> bool:
    """Whether the last line of the screen with a text is an empty prompt."""
    return last_line(text) == PROMPT.strip()


def last_line(text: str) -> str:
    return ["", *(line.rstrip() for line in text.splitlines() if line.strip())][-1]


def enter(seen: Terminal, text: str) -> None:
    """Enter a message and wait for the end of its answer."""
    before = seen.output.count(b"tokens cached]")
    seen.type(text.encode() + ENTER)
    shows(seen, lambda text: seen.output.count(b"tokens cached]") > before and waits(text))


def shows(seen: Terminal, condition: Any) -> None:
    assert seen.shows(condition), seen.text()


def pipe(engine: str, lines: str, *arguments: str) -> Result:
    """Run the command in this process, with a pipe as input."""
    arguments = ("chat", "--attach", engine, *arguments)
    return CliRunner().invoke(cli, arguments, input=lines, standalone_mode=False)


def answers_of(llm: LLM, *questions: str) -> list[str]:
    """What the model answers to each question in one conversation."""
    params = SamplingParams(temperature=0, max_tokens=6)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def test_each_line_of_a_pipe_is_a_message_and_answers_are_plain(llm: LLM, engine: str) -> None:
    done = pipe(engine, "open a file\n\nand close it", *SHORT)
    assert done.return_value == 0, done.stderr
    expected = answers_of(llm, "open a file", "and close it")
    assert done.stdout == "".join(map(ended, expected))
    assert "\x1b" not in done.output
    first, second = FIGURES.findall(done.stderr)
    assert first[0] == second[0] == "6"
    assert int(second[1]) <= int(second[2]) > int(first[2])


def test_a_line_that_fails_is_named_and_the_others_still_run(llm: LLM, engine: str) -> None:
    too_long = "word " * 2000
    done = pipe(engine, f"one\n{too_long}\n/nope\none", *SHORT)
    assert done.return_value == 1
    complaints = [line for line in done.stderr.splitlines() if line.startswith("shmllm: ")]
    assert len(complaints) == 2
    assert "the engine takes 1,023" in complaints[0]
    assert "/reset" in complaints[0]
    assert "unknown command /nope" in complaints[1]
    assert done.stdout == "".join(map(ended, answers_of(llm, "one", "one")))


def test_saved_messages_begin_the_next_chat_and_are_a_batch(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    file = tmp_path / "saved.jsonl"
    done = pipe(engine, f"one\n/save {file}", *SHORT)
    assert done.return_value == 0, done.stderr
    again = pipe(engine, "two", "--messages", str(file), *SHORT)
    assert again.stdout == ended(answers_of(llm, "one", "two")[1])
    records = tmp_path / "records.jsonl"
    command = ["generate", "--attach", engine, "-i", str(file), "-o", str(records), *SHORT]
    assert CliRunner().invoke(cli, command, standalone_mode=False).return_value == 0
    assert json.loads(records.read_text())["num_output_tokens"] == 6


def test_a_context_that_is_full_is_said(llm: LLM, engine: str) -> None:
    done = pipe(engine, "word " * 500, "--max-tokens", "900", "--ignore-eos")
    assert "the 1,024 tokens of context are full; /reset" in done.stderr


def test_an_answer_that_the_engine_ends_is_exit_code_3(llm: LLM, engine: str) -> None:
    before = llm.get_metrics()["generated_tokens"]

    def pause() -> None:
        wait_until(lambda: llm.get_metrics()["generated_tokens"] > before + 3, "an answer")
        llm.pause_generation("abort")

    thread = threading.Thread(target=pause)
    with slow_steps(llm):
        thread.start()
        try:
            done = pipe(engine, "print a number", *ENDLESS)
        finally:
            join_all([thread])
            llm.resume_generation()
    assert done.return_value == 3
    assert "[cut off: the engine was paused" in done.stderr
    assert done.stdout.endswith("\n")


def test_a_model_without_a_template_says_what_to_do(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shmllm.frontend.text.chat_template.load_templates", lambda directory: {})
    done = pipe(engine, "one")
    assert str(done.exception) == (
        "the model has no chat template; give one with --chat-template FILE, or complete texts "
        'with: shmllm generate "TEXT"'
    )
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert pipe(engine, "one", "--chat-template", str(template), *SHORT).return_value == 0


@pytest.mark.parametrize("parser", ["hermes", ""])
def test_a_named_parser_reads_calls_that_the_template_does_not_show(
    llm: LLM, engine: str, tmp_path: Path, parser: str
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "time"}}]')
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    done = pipe(engine, "one", "--tools", str(tools), "--tool-parser", parser, "--choice", call)
    assert done.return_value == 0
    shown = done.stdout + done.stderr
    assert ("time({})" in shown) == bool(parser)
    assert (call in shown) != bool(parser)


def test_a_wrong_parser_is_named(engine: str) -> None:
    done = pipe(engine, "one", "--tool-parser", "herms")
    assert "tool_parser='herms' is unknown; did you mean 'hermes'?" in str(done.exception)


def test_a_closed_stdout_is_one_line() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" chat >&-', sys.executable, CLI],
        input=b"one\n",
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.decode() == "shmllm: standard output is closed\n"


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(llm: LLM, engine: str, tmp_path: Path) -> None:
    with slow_steps(llm), chat(engine, tmp_path, *ENDLESS) as seen:
        seen.type(b"print a number" + ENTER)
        shows(seen, lambda text: text.count("#") > 3)
        seen.type(CTRL_C)
        shows(seen, lambda text: "the answer so far stays" in text and waits(text))
        wait_until(lambda: is_idle(llm), "the end of the stopped request")
        seen.type(CTRL_C)
        shows(seen, lambda text: "\nCtrl-D ends the chat" in text and waits(text))
        seen.type(b"half a mess" + CTRL_C)
        shows(seen, lambda text: "> half a mess" in text and waits(text))
        seen.type(b"/save " + str(tmp_path / "saved.json").encode() + ENTER)
        shows(seen, lambda text: "2 messages written" in text and waits(text))
        seen.type(CTRL_D)
        assert seen.ends() == 0
    question, answer = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert question["content"] == "print a number"
    assert 0 < answer["content"].count("#") < 900


def test_ctrl_c_before_the_answer_leaves_no_message(llm: LLM, engine: str, tmp_path: Path) -> None:
    with chat(engine, tmp_path, *SHORT) as seen:
        llm.pause_generation("keep")
        seen.type(b"one" + ENTER)
        wait_until(lambda: llm.get_metrics()["waiting"] == 1, "the request")
        seen.type(CTRL_C)
        shows(seen, lambda text: "the conversation is as it was" in text and waits(text))
        llm.resume_generation()
        seen.type(b"/regenerate" + ENTER)
        shows(seen, lambda text: "no message to answer again" in text and waits(text))
        seen.type(CTRL_D)
        assert seen.ends() == 0


def test_what_was_entered_comes_back_with_the_arrow_key_in_the_next_chat(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    with chat(engine, tmp_path, *SHORT) as seen:
        seen.type(b"/system Be brief.\x1b\r\xc3\xa9" + ENTER)
        shows(seen, lambda text: "system message set" in text and waits(text))
        seen.type(CTRL_D)
        assert seen.ends() == 0
    (file,) = (tmp_path / "shmllm").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    with chat(engine, tmp_path, *SHORT) as seen:
        seen.type(UP)
        shows(seen, lambda text: "> /system Be brief.\n" in re.sub(" +\n", "\n", text))
        assert last_line(seen.text()) == "  é"
        seen.type(CTRL_C)
        shows(seen, waits)
        seen.type(CTRL_D)
        assert seen.ends() == 0


def test_a_history_that_cannot_be_written_is_no_failure(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    (tmp_path / "shmllm").write_text("a file where the folder should be")
    with chat(engine, tmp_path, *SHORT) as seen:
        enter(seen, "one")
        assert "xception" not in seen.text()
        seen.type(CTRL_D)
        assert seen.ends() == 0


def test_a_paste_is_one_message(llm: LLM, engine: str, tmp_path: Path) -> None:
    words = "\n".join(["pass a word"] * 400)
    with chat(engine, tmp_path, *SHORT) as seen:
        seen.type(b"\x1b[200~one\n\ttwo\r\nthree\x1b[201~" + ENTER)
        shows(seen, lambda text: b"tokens cached]" in seen.output and waits(text))
        seen.type(b"\x1b[200~" + words.encode() + b"\x1b[201~" + ENTER)
        shows(seen, lambda text: "takes 1,023" in text.replace("\n", "") and waits(text))
        seen.type(b"/save " + str(tmp_path / "saved.json").encode() + ENTER)
        shows(seen, lambda text: "2 messages written" in text and waits(text))
        seen.type(CTRL_D)
        assert seen.ends() == 0
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert messages[0]["content"] == "one\n\ttwo\nthree"


def test_a_narrow_terminal_and_a_resize(llm: LLM, engine: str, tmp_path: Path) -> None:
    with chat(engine, tmp_path, *SHORT, columns=40, lines=12) as seen:
        seen.type(b"a message that is longer than one line of it")
        shows(seen, lambda text: last_line(text) == "   of it")
        seen.resize(30, 10)
        shows(seen, lambda text: last_line(text) == "  n one line of it")
        seen.type(ENTER)
        shows(seen, waits)
        seen.type(CTRL_D)
        assert seen.ends() == 0


def test_what_is_typed_during_an_answer_is_the_next_message(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    with chat(engine, tmp_path, "--ignore-eos", "--max-tokens", "60") as seen:
        with slow_steps(llm):
            seen.type(b"one" + ENTER)
            shows(seen, lambda text: "#" in text)
            seen.type(b"/system typed ahead" + ENTER)
        shows(seen, lambda text: "system message set" in text and waits(text))
        seen.type(CTRL_D)
        assert seen.ends() == 0


def test_sigterm_ends_the_chat_with_the_terminal_as_it_was(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    with chat(engine, tmp_path) as seen:
        seen.process.send_signal(signal.SIGTERM)
        assert seen.ends() == 143


def test_two_chats_share_an_engine(llm: LLM, engine: str, tmp_path: Path) -> None:
    with chat(engine, tmp_path, *ENDLESS) as one, chat(engine, tmp_path, *SHORT) as other:
        with slow_steps(llm):
            one.type(b"one" + ENTER)
            shows(one, lambda text: text.count("#") > 1)
        enter(other, "two")
        one.type(CTRL_C)
        shows(one, waits)
        for each in (one, other):
            each.type(CTRL_D)
        assert (one.ends(), other.ends()) == (0, 0)


@pytest.mark.slow
def test_an_engine_that_dies_in_an_answer_is_one_line(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, pid), chat(name, tmp_path, *ENDLESS) as seen:
        seen.type(b"one" + ENTER)
        shows(seen, lambda text: text.count("#") > 1)
        os.kill(pid, signal.SIGKILL)
        assert seen.ends() == 3
        assert re.match(r"shmllm: engine process \d+ died", last_line(seen.text()))


def test_generate_with_chat_and_no_prompt_opens_it_and_ctrl_c_ends_its_start() -> None:
    with opened_terminal("generate", "--chat", "--num-threads", "1") as seen:
        shows(seen, lambda text: "starting tiny" in text)
        seen.type(CTRL_C)
        assert seen.ends() == 130
        assert last_line(seen.text()) == "interrupted"


SWALLOWS = """
import time, tty
from shmllm.cli.interrupts import Interrupted, interruptible
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except Interrupted:
        tty.setraw(0)
        time.sleep(600)
"""
"""A command in which something swallows the interruption, and which then changes the mode."""


def test_a_command_that_has_to_be_left_gives_the_terminal_its_mode_back() -> None:
    with opened_terminal(cli=SWALLOWS) as seen:
        shows(seen, lambda text: "ready" in text)
        seen.type(CTRL_C)
        assert seen.ends() == 130
