"""Where prompts of a command come from, and how a bad one is named."""

from __future__ import annotations

import io

import click
import pytest

from shmllm.cli.prompts import InputPrompt, read_prompts


def source(text, name="prompts.txt"):
    stream = io.StringIO(text)
    stream.name = name
    return stream


def read(text, **options):
    return read_prompts((), source(text), **{"chat": False, "system": None} | options)


def contents(text, **options):
    return [item.content for item in read(text, **options)]


class Stdin(io.StringIO):
    def __init__(self, text, is_terminal):
        super().__init__(text)
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def test_arguments_are_prompts_as_they_are():
    found = read_prompts(("a", "{ b"), None, chat=False, system=None)
    assert found == [InputPrompt("a", "prompt 1"), InputPrompt("{ b", "prompt 2")]


def test_a_pipe_is_one_prompt_with_all_its_lines(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("one\ntwo\n", False))
    found = read_prompts((), None, chat=False, system=None)
    assert found == [InputPrompt("one\ntwo\n", "standard input")]


def test_arguments_win_over_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("piped", False))
    assert read_prompts(("a",), None, chat=False, system=None)[0].content == "a"


def test_a_terminal_without_a_prompt_gets_an_example(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("", True))
    with pytest.raises(click.UsageError, match="no prompt; try: shmllm generate"):
        read_prompts((), None, chat=False, system=None)


def test_two_sources_are_refused():
    with pytest.raises(click.UsageError, match="not both"):
        read_prompts(("a",), source("b"), chat=False, system=None)


@pytest.mark.parametrize("text", ["", "\n", "  \n\t\n"])
def test_an_input_without_a_prompt_is_refused(text):
    with pytest.raises(click.UsageError, match="holds no prompt"):
        read(text)


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\n\n  \nb", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("  indented  \n", ["  indented  "]),
        ("{ not json\nb\n", ["{ not json", "b"]),
        ("[1, 2]\n", ["[1, 2]"]),
        ('"text"\n', ['"text"']),
        ('first\n{"prompt": "x"}\n', ["first", '{"prompt": "x"}']),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n', ["a", "b"]),
        ('\n  {"prompt": "a"}\n', ["a"]),
        ('{"prompt": "a\\nb"}\n', ["a\nb"]),
        ('{"prompt_token_ids": [1, 2]}\n', [{"prompt_token_ids": [1, 2]}]),
        ('{"messages": [{"role": "user"}]}\n', [[{"role": "user"}]]),
        ('{"prompt": "a", "id": 7}\n', ["a"]),
        ('{"prompt": "a", "cache_salt": "s"}\n', [{"prompt": "a", "cache_salt": "s"}]),
    ],
    ids=repr,
)
def test_lines_are_prompts_or_json(text, prompts):
    assert contents(text) == prompts


def test_origins_count_all_lines_and_name_the_file():
    assert [item.origin for item in read("a\n\nb\n")] == [
        "line 1 of prompts.txt",
        "line 3 of prompts.txt",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "line 3 of prompts.txt is not JSON"),
        ('{"prompt": "a"', "line 3 of prompts.txt is not JSON"),
        ("[1]", "line 3 of prompts.txt is not a JSON object"),
        ("{}", "line 3 of prompts.txt has none of 'prompt', 'messages', 'prompt_token_ids'"),
        ('{"prompt": 5}', "line 3 of prompts.txt: 'prompt' must be a str"),
        ('{"prompt": null}', "'prompt' must be a str"),
        ('{"messages": "hi"}', "'messages' must be a list"),
        ('{"prompt_token_ids": "1 2"}', "'prompt_token_ids' must be a list"),
    ],
)
def test_a_bad_record_is_named_by_its_line(line, words):
    with pytest.raises(click.UsageError, match=words):
        read(f'{{"prompt": "a"}}\n\n{line}\n')


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("text", "system", "messages"),
    [
        ("hi", None, [USER]),
        ("hi", "be brief", [SYSTEM, USER]),
        ("hi", "", [{"role": "system", "content": ""}, USER]),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "be brief", [SYSTEM, USER]),
    ],
)
def test_chat_turns_prompts_into_messages(text, system, messages):
    assert contents(text, chat=True, system=system) == [messages]


def test_chat_keeps_origins():
    assert read("hi", chat=True)[0].origin == "line 1 of prompts.txt"


def test_token_ids_are_no_chat():
    with pytest.raises(click.UsageError, match=r"line 1 of prompts\.txt: neither token ids nor"):
        read('{"prompt_token_ids": [1]}', chat=True)
