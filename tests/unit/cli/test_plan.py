"""Plans: which outputs are records, and which options contradict each other."""

from __future__ import annotations

import os

import click
import pytest

from shmllm.batch.output import Mode
from shmllm.batch.shard import Shard
from shmllm.cli.batch_plan import look_at
from shmllm.cli.plan import make_plan, wants_records
from shmllm.errors import RequestError

NONE = {
    "as_json": False,
    "ordered": False,
    "resume": False,
    "overwrite": False,
    "token_ids": False,
    "openai_batch": False,
    "shard": None,
    "target": None,
    "echo": False,
    "chat": False,
    "system": None,
    "decoder_prompt": None,
    "chat_template": None,
}


@pytest.fixture
def jsonl(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    return look_at(str(tmp_path / "in.jsonl"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "in.txt").write_text("a\n")
    return look_at(str(tmp_path / "in.txt"))


def plan(found, **options):
    return make_plan(found, ["a"], NONE | options)


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({}, False),
        ({"target": "out.txt"}, False),
        ({"target": "out.txt", "overwrite": True}, False),
        ({"target": "out.jsonl"}, True),
        ({"target": "out.parquet"}, True),
        ({"as_json": True}, True),
        ({"resume": True}, True),
        ({"ordered": True}, True),
        ({"token_ids": True}, True),
        ({"shard": Shard(0, 2)}, True),
    ],
    ids=str,
)
def test_text_input_gives_text_output_unless_an_option_asks_for_records(text, options, records):
    assert wants_records(text, NONE | options) is records
    assert wants_records(None, NONE | options) is records


def test_json_lines_give_records(jsonl):
    assert wants_records(jsonl, NONE)


@pytest.mark.parametrize(
    ("found", "asked", "ordered"),
    [("jsonl", False, False), ("jsonl", True, True), ("text", False, True)],
)
def test_text_and_arguments_are_always_in_order(request, found, asked, ordered):
    assert plan(request.getfixturevalue(found), ordered=asked).ordered is ordered
    assert plan(None).ordered


@pytest.mark.parametrize(
    ("options", "mode"),
    [({}, Mode.NEW), ({"resume": True}, Mode.RESUME), ({"overwrite": True}, Mode.OVERWRITE)],
)
def test_the_mode_for_existing_records(jsonl, tmp_path, options, mode):
    assert plan(jsonl, target=str(tmp_path / "out.jsonl"), **options).mode is mode


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": True, "overwrite": True, "target": "x"}, "give one"),
        ({"resume": True}, "--resume needs a file as --output"),
        ({"resume": True, "target": "-"}, "--resume needs a file as --output"),
        ({"resume": True, "target": "/dev/null"}, "--resume needs a file as --output"),
        ({"target": "out.jsonl.gz"}, "compressed output is not supported"),
        ({"target": "."}, "is a directory"),
        ({"openai_batch": True, "chat": True}, "--chat cannot be used with --openai-batch"),
        ({"openai_batch": True, "token_ids": True}, "--token-ids cannot be used with"),
    ],
    ids=str,
)
def test_contradicting_options_are_refused(jsonl, options, words):
    with pytest.raises(click.UsageError, match=words):
        plan(jsonl, **options)


def test_the_input_is_refused_as_the_output(jsonl, tmp_path):
    os.link(jsonl.path, tmp_path / "same")
    for target in (jsonl.path, str(tmp_path / "same")):
        with pytest.raises(click.UsageError, match="is also the input"):
            plan(jsonl, target=target, overwrite=True)


def test_only_a_file_can_be_resumed():
    with pytest.raises(click.UsageError, match="the command line is not a file"):
        plan(None, resume=True, target="out.jsonl")


def test_openai_s_format_needs_an_input():
    with pytest.raises(click.UsageError, match="--openai-batch needs --input"):
        plan(None, openai_batch=True)


def test_the_error_of_a_missing_input_names_it():
    with pytest.raises(click.FileError, match=r"^No such file") as caught:
        look_at("/no/such/file")
    assert caught.value.ui_filename == "/no/such/file"


def test_an_existing_parquet_file_is_complete(jsonl, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow, of the extra parquet, is missing")
    target = tmp_path / "out.parquet"
    found = plan(jsonl, target=str(target))
    assert found.path == f"{target}.partial.jsonl"
    target.touch()
    for options in ({}, {"resume": True}):
        with pytest.raises(RequestError, match="exists and is complete; --overwrite replaces it"):
            plan(jsonl, target=str(target), **options)
    assert plan(jsonl, target=str(target), overwrite=True).mode is Mode.OVERWRITE


def test_a_shard_of_text_is_in_order_and_may_have_no_rows(text):
    found = plan(text, shard=Shard(1, 2))
    assert found.ordered
    assert found.is_shard
    assert found.rows.count() == (0, 1)
