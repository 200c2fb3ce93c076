"""Tool calls through the commands: a chat in a pipe, and a batch file of OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import TIME, WEATHER, make_chat_model
from support.commands import command

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OSLO = '{"city": "Oslo", "days": 2}'
REPLY = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
)


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    """The options of a model with random weights."""
    directory = tmp_path / "qwen3"
    directory.mkdir()
    name = str(make_chat_model(directory, "qwen3"))
    return ("-m", name, "--load-format", "dummy", "--kv-cache-memory-bytes", "64MiB")


def test_a_chat_shows_calls_and_takes_their_results(model: tuple[str, ...], tmp_path: Path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps([WEATHER, TIME]))
    lines = f"How is Oslo?\n12 degrees\n/save {saved}\n"
    done = command(
        *("chat", *model, "--tools", str(tools), "--choice", REPLY), input=lines.encode()
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"I look.\nI look.\n"
    remarks = done.stderr.decode()
    assert remarks.count(f"\nweather({OSLO})\n[enter the result of weather]\n") == 2
    assert remarks.count("\nHm.\n") == 2
    messages = json.loads(saved.read_text())["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[2]["content"] == "12 degrees"


@pytest.mark.parametrize("text", ["{", "[]", '[{"name": "f"}]'])
def test_a_file_without_tools_is_refused_before_an_engine_starts(
    model: tuple[str, ...], tmp_path: Path, text: str
) -> None:
    (tmp_path / "tools.json").write_text(text)
    done = command("chat", *model, "--tools", str(tmp_path / "tools.json"))
    assert done.returncode == 2
    assert b"tools.json" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tool-choice", "required"), "--tool-choice needs --tools FILE"),
        (
            ("--tools", "TOOLS", "--tool-choice", "wether"),
            "no tool has the name 'wether'; give auto, none, required, or the name of one in "
            "--tools: weather, time",
        ),
        (
            ("--tools", "TOOLS", "--tool-choice", "weather", "--json-schema", "{}"),
            "--tool-choice weather and --json-schema exclude each other: give one",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_an_engine_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER, TIME]))
    given = [str(tools) if each == "TOOLS" else each for each in arguments]
    done = command("chat", "-m", "./no-model", *given)
    assert done.returncode == 2
    assert message in done.stderr.decode()


NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def write_tools(
    directory: Path, *names: str, parameters: dict[str, Any] = NO_ARGUMENTS
) -> tuple[str, str]:
    """The option that offers tools of these names."""
    file = directory / "named.json"
    functions = [{"name": name, "parameters": parameters} for name in names]
    file.write_text(json.dumps([{"type": "function", "function": each} for each in functions]))
    return "--tools", str(file)


@pytest.mark.parametrize(
    ("choice", "called"), [("time", {"time"}), ("required", {"time", "date"}), ("none", set())]
)
def test_a_choice_forces_calls_for_messages_and_not_for_results(
    engine: str, tmp_path: Path, choice: str, called: set[str]
) -> None:
    tools = write_tools(tmp_path, "date", "time")
    saved = tmp_path / "saved.json"
    lines = f"one\n/save {saved}\n/result noon\n/save! {saved}"
    done = command(
        *("chat", "--attach", engine, *tools, "--tool-parser", "hermes", "--tool-choice", choice),
        *("--temperature", "0", "--max-tokens", "60"),
        input=lines.encode(),
    )
    assert done.returncode == (0 if called else 1), done.stderr.decode()
    question, answer, *rest = json.loads(saved.read_text())["messages"]
    calls = {each["function"]["name"] for each in answer.get("tool_calls", ())}
    assert bool(called) == bool(calls)
    assert calls <= called
    assert question["role"] == "user"
    assert ["tool_calls" in each for each in rest] == [False] * (2 * bool(called))
    assert (b"no tool call waits" in done.stderr) != bool(called)


WITH_NOT = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}


@pytest.mark.parametrize(
    ("parser", "parameters", "message"),
    [
        ("auto", NO_ARGUMENTS, "set the option tool_parser (--tool-parser), or pass a"),
        (
            *("hermes", WITH_NOT),
            "--tool-choice cannot force a call of 'time': its schema: has the keyword 'not' at "
            "properties.x, which cannot be enforced; remove it",
        ),
    ],
)
def test_a_choice_that_cannot_be_forced_is_said_before_the_first_message(
    engine: str, tmp_path: Path, parser: str, parameters: dict[str, Any], message: str
) -> None:
    tools = write_tools(tmp_path, "time", parameters=parameters)
    options = ("--attach", engine, *tools, "--tool-parser", parser, "--max-tokens", "6")
    done = command("chat", *options, "--tool-choice", "required", input=b"one")
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()
    assert command("chat", *options, input=b"one").returncode == 0


def test_a_batch_of_openais_form_has_calls(model: tuple[str, ...], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How is Oslo?"}]
    body = {"messages": messages, "tools": [WEATHER], "max_tokens": 200, "temperature": 1.0}
    named = {"type": "function", "function": {"name": "weather"}}
    bodies = [
        {**body, "structured_outputs": {"choice": [REPLY]}},
        {**body, "tool_choice": named, "thinking_token_budget": 3},
        {**body, "tool_choice": "any"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": each}
        for i, each in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command("generate", *model, "--openai-batch", "-i", str(source), "-o", str(target))
    found = {
        record["custom_id"]: record["response"]["body"]
        for record in map(json.loads, target.read_text().splitlines())
    }
    [written], [forced] = found["0"]["choices"], found["1"]["choices"]
    assert (written["message"]["reasoning"], written["message"]["content"]) == ("Hm.", "I look.")
    assert written["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": OSLO}
    assert (written["finish_reason"], forced["finish_reason"]) == ("tool_calls", "tool_calls")
    arguments = json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments.keys() == {"city", "days"}
    assert "tool_choice must be 'auto'" in found["2"]["error"]["message"]
