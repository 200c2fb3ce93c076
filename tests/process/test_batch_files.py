"""`shmllm generate` with files of records: inputs, outputs and exit codes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.programs import (
    CLI,
    SLOW_CLI,
    Completed,
    children,
    is_running,
    read_line,
    start_source,
    watched,
)
from support.terminals import opened_terminal
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = ("--temperature", "0", "--max-tokens", "8")
SLOW = ("--ignore-eos", "--max-tokens", "100", "--num-threads", "1", "--max-num-seqs", "4")
Shmllm = Callable[..., Completed]
MESSAGES = [{"role": "user", "content": "Reverse a list."}]


@pytest.fixture
def shmllm(engine: str) -> Shmllm:
    """Runs `shmllm generate` on the engine of the module."""

    def run(*arguments: str | Path, **options: Any) -> Completed:
        where = () if "-m" in arguments else ("--attach", engine)
        return commands.shmllm("generate", *map(str, arguments), *where, **options)

    return run


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def by_line(path: Path) -> dict[int, dict[str, Any]]:
    found = records(path.read_bytes())
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: record for record in found}


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def llm(engine: str) -> Iterator[LLM]:
    with LLM.attach(engine) as llm:
        yield llm


def output_of(llm: LLM, prompt: Any, **options: Any) -> RequestOutput:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 8} | options))
    return llm.generate([prompt], params, use_tqdm=False)[0]


def text_of(llm: LLM, prompt: Any, **options: Any) -> str:
    return output_of(llm, prompt, **options).outputs[0].text


def test_the_progress_of_prompts_as_arguments_has_a_total(shmllm: Shmllm) -> None:
    done = shmllm("import os", "import sys", "--json", *GREEDY)
    assert len(records(done.stdout)) == 2
    assert b" 2/2 " in done.stderr


def test_sampling_parameters_beside_the_prompt(
    shmllm: Shmllm, llm: LLM, tmp_path: Path, target: Path
) -> None:
    """The rows that examples/batch_file.py writes, and what a row cannot say."""
    names = ("first", "last", "count")
    rows: list[Any] = [
        {"id": i, "prompt": f"def {name}(items):", "max_tokens": 4 * (i + 1)}
        for i, name in enumerate(names)
    ]
    several = {"prompt": "import", "n": 2, "seed": 3, "logprobs": 0}
    wrong = {"prompt": "x", "temperature": 9}
    source = write(tmp_path / "in.jsonl", [*rows, several, wrong])
    done = shmllm("-i", source, "-o", target)
    assert done.returncode == 1
    found = by_line(target)
    for line, row in enumerate(rows, 1):
        assert found[line]["text"] == text_of(llm, row["prompt"], max_tokens=row["max_tokens"])
        assert "max_tokens" not in found[line]
    expected = output_of(llm, "import", n=2, seed=3, temperature=1, max_tokens=128)
    assert [one["text"] for one in found[4]["outputs"]] == [one.text for one in expected.outputs]
    assert len(found[4]["logprobs"]) == len(expected.outputs[0].token_ids)
    assert found[5]["error"] == "temperature must be a number from 0 to 2, got 9"


def test_rows_of_every_kind(shmllm: Shmllm, llm: LLM, tmp_path: Path, target: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            {"prompt": "import os", "id": "first"},
            "",
            {"messages": MESSAGES, "split": {"name": "train"}},
            {"prompt_token_ids": [5, 6, 7], "text": "mine"},
            {"prompt": "class", "sampling_params": {"max_tokens": 3}, "id": 4},
        ],
    )
    done = shmllm("-i", source, "-o", target, *GREEDY)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    assert "4/4" in done.stderr.decode()
    assert "prefix hits" in done.stderr.decode()
    chat = llm.front_end.chat_prompt(MESSAGES)
    expected = {
        1: (output_of(llm, "import os"), {"id": "first"}),
        3: (output_of(llm, chat), {"split": {"name": "train"}}),
        4: (output_of(llm, {"prompt_token_ids": [5, 6, 7]}), {"input_text": "mine"}),
        5: (output_of(llm, "class", max_tokens=3), {"id": 4}),
    }
    assert by_line(target) == {
        line: {
            "line": line,
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_output_tokens": len(output.outputs[0].token_ids),
            "num_cached_tokens": 0,
            **carried,
        }
        for line, (output, carried) in expected.items()
    }


def test_records_are_written_as_they_are_finished_or_in_order(
    shmllm: Shmllm, tmp_path: Path
) -> None:
    lengths = [60, 1, 30, 1, 60, 1]
    source = write(
        tmp_path / "in.jsonl",
        [
            {"prompt": "x =", "sampling_params": {"max_tokens": n, "ignore_eos": True}}
            for n in lengths
        ],
    )
    whole = {}
    for name, options in (("any", ()), ("ordered", ("--ordered",))):
        done = shmllm("-i", source, *GREEDY, *options)
        assert done.returncode == 0, done.stderr.decode()
        whole[name] = records(done.stdout)
    assert [record["line"] for record in whole["ordered"]] == [1, 2, 3, 4, 5, 6]
    assert {record["line"] for record in whole["any"][:3]} == {2, 4, 6}
    assert sorted(whole["any"], key=lambda record: record["line"]) == whole["ordered"]
    assert [record["num_output_tokens"] for record in whole["ordered"]] == lengths


def test_text_lines_become_records_in_order(
    shmllm: Shmllm, llm: LLM, tmp_path: Path, target: Path
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("import os\n\nclass\n")
    assert shmllm("-i", source, "-o", target, *GREEDY, "--token-ids").returncode == 0
    found = records(target.read_bytes())
    assert [(r["line"], r["index"], r["prompt"]) for r in found] == [
        (1, 0, "import os"),
        (3, 1, "class"),
    ]
    for record in found:
        output = output_of(llm, record["prompt"]).outputs[0]
        assert (record["text"], record["token_ids"]) == (output.text, output.token_ids)


def test_pipes_and_compressed_files(shmllm: Shmllm, tmp_path: Path) -> None:
    row = b'{"prompt": "import os"}\n'
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(row))
    piped = shmllm("-i", "-", "-o", "-", *GREEDY, input=row)
    packed = shmllm("-i", tmp_path / "in.jsonl.gz", *GREEDY)
    assert piped.returncode == packed.returncode == 0, piped.stderr.decode()
    assert piped.stdout == packed.stdout
    assert records(piped.stdout)[0]["num_output_tokens"] == 8


BAD_ROWS: list[tuple[str, str]] = [
    ("not JSON", "^not JSON: Expecting value"),
    ('{"prompt": "x"', "^not JSON: "),
    ("[1]", "^not a JSON object$"),
    ("5", "^not a JSON object$"),
    ("[" * 100_000, "^not (JSON|usable)"),
    ("{}", "^none of 'prompt', 'messages', 'prompt_token_ids' is given$"),
    ('{"prompt": 5}', "^'prompt' must be a string, got 5$"),
    ('{"prompt": null}', "^'prompt' must be a string, got null$"),
    ('{"prompt": ""}', "^the prompt is empty: the model needs"),
    ('{"prompt": "\\ud800"}', "not valid Unicode"),
    (json.dumps({"prompt": "x " * 5000}), r"^the prompt has [\d,]+ tokens; max_model_len is"),
    ('{"prompt_token_ids": []}', "^the prompt is empty"),
    ('{"prompt_token_ids": [99999999]}', "^the prompt has token id 99999999; the vocabulary"),
    ('{"prompt_token_ids": [-1]}', "^the prompt has token id -1"),
    ('{"prompt_token_ids": [1.5]}', "must be a list of whole numbers"),
    ('{"prompt": "x", "cache_salt": 5}', "^the prompt: 'cache_salt' must be a str"),
    ('{"messages": []}', "messages is empty"),
    ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no content"),
    ('{"messages": [5]}', r"messages\[0\] must be a dict"),
    ('{"prompt": "x", "messages": []}', "'prompt' and 'messages' are both given"),
    ('{"prompt": "x", "sampling_params": []}', "^'sampling_params' must be an object"),
    (
        '{"prompt": "x", "sampling_params": {"temprature": 1}}',
        "unknown option 'temprature'; the nearest option is 'temperature'",
    ),
    ('{"prompt": "x", "sampling_params": {"temperature": 9}}', "temperature must be .*got 9"),
    ('{"prompt": "x", "sampling_params": {"max_tokens": "8"}}', "max_tokens must be .*got '8'"),
    ('{"prompt": "x", "sampling_params": {"output_kind": 2}}', "output_kind is not for batch"),
    (
        '{"prompt": "x", "sampling_params": {"stop_token_ids": [99999999]}}',
        "stop_token_ids has 99999999",
    ),
]


def test_a_bad_row_becomes_a_record_and_the_others_are_done(
    shmllm: Shmllm, tmp_path: Path, target: Path
) -> None:
    rows: list[Any] = [line for line, _ in BAD_ROWS]
    rows.insert(3, {"prompt": "import os"})
    rows.append({"prompt": "import os"})
    done = shmllm("-i", write(tmp_path / "in.jsonl", rows), "-o", target, *GREEDY)
    assert done.returncode == 1, done.stderr.decode()
    found = by_line(target)
    assert sorted(found) == list(range(1, len(rows) + 1))
    assert "error" not in found.pop(4)
    assert "error" not in found.pop(len(rows))
    for (line, words), record in zip(BAD_ROWS, map(found.get, sorted(found)), strict=True):
        assert re.search(words, record["error"]), (line[:80], record)
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"shmllm: {len(BAD_ROWS)} of {len(rows)} rows failed")


def test_bytes_that_are_not_utf8_are_a_bad_row(shmllm: Shmllm, tmp_path: Path) -> None:
    """It is the only one, and is a record, too."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    done = shmllm("-i", path)
    assert done.returncode == 1
    assert records(done.stdout) == [
        {"line": 1, "error": "not UTF-8: invalid start byte at byte 13"},
    ]


REFUSED: dict[str, tuple[list[str], str]] = {
    "output is there": (["-i", "IN", "-o", "FULL"], "is not empty; --resume continues it"),
    "output of others": (["-i", "IN", "-o", "FULL", "--resume"], "line 1 of .* is not JSON"),
    "no prompt": (["-i", "EMPTY"], "the input holds no prompt"),
    "missing input": (["-i", "/no/such/file.jsonl"], "/no/such/file.jsonl.*No such file"),
    "missing folder": (["-i", "IN", "-o", "/no/such/out.jsonl"], "No such file.*/no/such/out"),
    "input is output": (["-i", "IN", "-o", "IN", "--overwrite"], "is also the input"),
    "resume a pipe": (["-i", "-", "-o", "OUT", "--resume"], "standard input is not a file"),
    "parameters": (["-i", "IN", "-o", "OUT", "--temperature", "9"], "temperature must be"),
    "no model": (["-i", "IN", "-o", "OUT", "-m", "no/such/model"], "not found: looked for"),
}


REFUSED_ELSEWHERE = ("missing input", "missing folder", "parameters", "no model")
"""What test_cli.py has by default."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in REFUSED_ELSEWHERE else ())
        for name in REFUSED
    ],
)
def test_a_refused_job_prints_one_line_and_changes_no_file(
    shmllm: Shmllm, name: str, tmp_path: Path
) -> None:
    arguments, words = REFUSED[name]
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("IN", "OUT", "FULL", "EMPTY")}
    contents = {"IN": '{"prompt": "x"}\n', "FULL": "precious\n", "EMPTY": "\n \n"}
    for key, content in contents.items():
        paths[key].write_text(content)
    done = shmllm(*[paths.get(a, a) for a in arguments], input=b'{"prompt": "x"}\n')
    assert done.returncode == 2, done.stderr.decode()
    lines = [x for x in done.stderr.decode().splitlines() if not re.match(r"Usage: |Try '|$", x)]
    assert len(lines) == 1
    assert re.search(words, lines[0])
    assert all(paths[key].read_text() == content for key, content in contents.items())
    assert len(list(tmp_path.iterdir())) == len(contents)


def test_resume_adds_what_is_missing_and_overwrite_starts_anew(
    shmllm: Shmllm, tmp_path: Path, target: Path
) -> None:
    rows = [{"prompt": f"x{i} =", "id": i} for i in range(5)] + ["bad"]
    source = write(tmp_path / "in.jsonl", rows)
    assert shmllm("-i", source, "-o", target, *GREEDY, "--resume").returncode == 1
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    done = shmllm("-i", source, "-o", target, *GREEDY, "--resume")
    assert done.returncode == 1, done.stderr.decode()
    assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert target.read_bytes().startswith(b"".join(lines[:3]))
    assert "1 of 6 rows failed" in done.stderr.decode()
    # Nothing is left: no engine is started, and the end is the same.
    again = shmllm("-i", source, "-o", target, "--resume", "-m", "no/such/model")
    assert again.returncode == 1
    assert "1 of 6 rows failed" in again.stderr.decode()
    assert shmllm("-i", source, "-o", target, *GREEDY, "--overwrite").returncode == 1
    assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_resume_refuses_another_input(shmllm: Shmllm, tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x", "id": 1}, {"prompt": "y", "id": 2}])
    assert shmllm("-i", source, "-o", target, *GREEDY).returncode == 0
    for rows, words in (
        ([{"prompt": "x", "id": 7}], "which has 1; is this the input of the earlier run"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": 7}], "line 2 has another id"),
    ):
        before = target.read_bytes()
        done = shmllm("-i", write(source, rows), "-o", target, "--resume")
        assert done.returncode == 2
        assert words in done.stderr.decode()
        assert target.read_bytes() == before


def test_openai_s_batch_files(shmllm: Shmllm, llm: LLM, tmp_path: Path, target: Path) -> None:
    def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
        body = {"model": "gpt-4o-mini", "temperature": 0, "max_tokens": 8} | body
        return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}

    source = write(
        tmp_path / "in.jsonl",
        [
            line("chat", "chat/completions", messages=MESSAGES),
            line("text", "completions", prompt="import os", stop=["\n"]),
            line("bad", "completions", prompt="x", temperature=9),
            line("embed", "embeddings", input="x"),
        ],
    )
    done = shmllm("-i", source, "-o", target, "--openai-batch")
    assert done.returncode == 1, done.stderr.decode()
    found = {record["custom_id"]: record for record in records(target.read_bytes())}
    chat = found["chat"]["response"]["body"]
    expected = output_of(llm, llm.front_end.chat_prompt(MESSAGES))
    assert chat["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert chat["model"] == "gpt-4o-mini"
    assert chat["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    text = found["text"]["response"]["body"]["choices"][0]
    assert text["text"] == text_of(llm, "import os", stop=["\n"])
    assert found["text"]["error"] is None
    assert "temperature must be" in found["bad"]["error"]["message"]
    assert "/v1/embeddings" in found["embed"]["response"]["body"]["error"]["message"]
    cut = b"".join(target.read_bytes().splitlines(keepends=True)[:2])
    target.write_bytes(cut)
    again = shmllm("-i", source, "-o", target, "--openai-batch", "--resume")
    assert again.returncode == 1, again.stderr.decode()
    resumed = records(target.read_bytes())
    assert sorted(r["custom_id"] for r in resumed) == ["bad", "chat", "embed", "text"]


def test_logprobs_and_several_completions(shmllm: Shmllm, llm: LLM, tmp_path: Path) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 3}
    rows = [{"prompt": "import os"}, {"prompt": "def f(", "sampling_params": sampled}]
    source = write(tmp_path / "in.jsonl", rows)
    done = shmllm("-i", source, *GREEDY, "--ordered", "--logprobs", "1", "--token-ids")
    assert done.returncode == 0, done.stderr.decode()
    first, second = records(done.stdout)
    expected = output_of(llm, "import os", logprobs=1).outputs[0]
    assert first["token_ids"] == expected.token_ids
    assert "outputs" not in first
    for position, entries in zip(expected.logprobs, first["logprobs"], strict=True):
        assert [entry["token_id"] for entry in entries] == list(position)
        for one, entry in zip(position.values(), entries, strict=True):
            assert (entry["token"], entry["rank"]) == (one.decoded_token, one.rank)
            assert entry["logprob"] == pytest.approx(one.logprob, abs=1e-4)
    both = output_of(llm, "def f(", **sampled).outputs
    assert [one["text"] for one in second["outputs"]] == [one.text for one in both]
    assert second["text"] == both[0].text
    assert second["num_output_tokens"] == sum(len(one.token_ids) for one in both)


def test_parquet_in_and_out(shmllm: Shmllm, llm: LLM, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow, of the extra parquet, is missing")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing")
    prompts = ["import os", "class", ""]
    columns = {"id": ["a", "b", "c"], "prompt": prompts, "k": [1, 2, None]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    target = tmp_path / "out.parquet"
    done = shmllm("-i", tmp_path / "in.parquet", "-o", target, *GREEDY)
    assert done.returncode == 1, done.stderr.decode()
    found = {record["id"]: record for record in pq.read_table(target).to_pylist()}
    assert [found[name]["k"] for name in "abc"] == [1, 2, None]
    assert [found[name]["text"] for name in "ab"] == [text_of(llm, p) for p in prompts[:2]]
    assert "the prompt is empty" in found["c"]["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]
    # As if the job had been killed: its records lie beside the file that is not there yet.
    journal = Path(f"{target}.partial.jsonl")
    journal.write_text(json.dumps(found["a"]) + "\n{torn")
    target.unlink()
    again = shmllm("-i", tmp_path / "in.parquet", "-o", target, *GREEDY, "--resume")
    assert again.returncode == 1, again.stderr.decode()
    resumed = {record["id"]: record for record in pq.read_table(target).to_pylist()}
    assert resumed == found
    assert not journal.exists()


def start(*arguments: str | Path, cli: str = CLI) -> subprocess.Popen[bytes]:
    return start_source(cli, "generate", *map(str, arguments), stderr=subprocess.PIPE)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write(tmp_path / "many.jsonl", [{"prompt": f"x{i} =", "id": i} for i in range(200)])


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_keeps_finished_rows_and_says_how_to_continue(
    many: Path, target: Path, number: signal.Signals, code: int
) -> None:
    process = start("-i", many, "-o", target, *SLOW)
    assert holds_within(lambda: num_lines(target) >= 4, PATIENCE_S)
    (engine,) = children(process.pid)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    message = stderr.decode()
    assert process.returncode == code, message
    assert "Traceback" not in message
    kept = by_line(target)
    assert 4 <= len(kept) < 200
    (hint,) = [line for line in message.splitlines() if "--resume" in line]
    assert hint.startswith(f"{len(kept)} of 200 rows are in {target}")
    assert holds_within(lambda: not is_running(engine), PATIENCE_S)


def test_a_job_ends_although_its_engine_does_not(many: Path, target: Path) -> None:
    process = start("-i", many, "-o", target, *SLOW)
    assert holds_within(lambda: num_lines(target) >= 1, PATIENCE_S)
    (engine,) = children(process.pid)
    os.kill(engine, signal.SIGSTOP)  # as if deep in a long step
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
        assert is_running(engine)
    finally:
        os.kill(engine, signal.SIGCONT)
    _, stderr = process.communicate(timeout=PATIENCE_S)  # the engine has it open, too
    assert b"--resume continues" in stderr
    assert holds_within(lambda: not is_running(engine), PATIENCE_S)


def test_a_killed_engine_ends_with_3_and_keeps_its_rows(many: Path, target: Path) -> None:
    process = start("-i", many, "-o", target, *SLOW)
    assert holds_within(lambda: num_lines(target) >= 4, PATIENCE_S)
    (engine,) = children(process.pid)
    os.kill(engine, signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    message = stderr.decode()
    assert process.returncode == 3, message
    kept = by_line(target)
    assert 4 <= len(kept) < 200
    assert all("text" in record for record in kept.values())
    assert f"{len(kept)} of 200 rows are in" in message
    assert len([x for x in message.splitlines() if x.startswith("shmllm: ")]) == 1
    assert "Traceback" not in message


def test_a_closed_pipe_ends_the_command_without_an_error(many: Path, engine: str) -> None:
    process = start("-i", many, "--attach", engine, *GREEDY, cli=SLOW_CLI)
    assert read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with watched(process):
        message = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0, message
    assert "Traceback" not in message
    assert "BrokenPipe" not in message


def test_two_jobs_cannot_write_to_one_file(
    shmllm: Shmllm, engine: str, many: Path, target: Path
) -> None:
    process = start("-i", many, "-o", target, "--attach", engine, *GREEDY, cli=SLOW_CLI)
    try:
        assert holds_within(lambda: num_lines(target) >= 1, PATIENCE_S)
        process.send_signal(signal.SIGSTOP)  # else it may end before the other one begins
        done = shmllm("-i", many, "-o", target, "--resume")
        assert done.returncode == 2
        assert "another job is writing to" in done.stderr.decode()
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line(shmllm: Shmllm, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    done = shmllm("-i", source, "-o", "/dev/full", *GREEDY)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.decode().splitlines()[-1]
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize("options", [(), slow(("--json",))])
def test_results_on_a_terminal_have_no_bar_among_them(
    options: tuple[str, ...], engine: str
) -> None:
    prompts = ("import os", "import sys")
    with opened_terminal("generate", *prompts, *options, *GREEDY, "--attach", engine) as terminal:
        assert terminal.ends() == 0
    assert terminal.output.count(b"generating") == 1
    assert b"2/2" in terminal.output.partition(b"generating")[2]
