"""`shmllm embed` and `shmllm score` with files: inputs, outputs, exit codes, kills."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands
from support.programs import CLI, SLOW_CLI, Completed, kill, start_source, watched
from support.terminals import opened_terminal
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM

try:
    import pyarrow.parquet as pq
except ImportError:
    pq = None

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

needs_pyarrow = pytest.mark.skipif(pq is None, reason="pyarrow, of the extra parquet, is missing")
FORMATS = ["jsonl", slow("npy"), pytest.param("parquet", marks=needs_pyarrow)]
Shmllm = Callable[..., Completed]


@pytest.fixture
def shmllm(engine: str) -> Shmllm:
    """Runs `shmllm` on the engine of the module."""

    def run(name: str, *arguments: str | Path, **options: Any) -> Completed:
        return commands.shmllm(name, *map(str, arguments), "--attach", engine, **options)

    return run


@pytest.fixture(scope="module")
def llm(engine: str) -> Iterator[LLM]:
    with LLM.attach(engine) as llm:
        yield llm


def vectors_of(llm: LLM, *texts: str) -> list[list[float]]:
    return [one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)]


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def refusal(done: Completed) -> str:
    """What a refused command says, after the line about an engine that it may have used."""
    assert done.returncode == 2, done.stderr.decode()
    lines = [x for x in done.stderr.decode().splitlines() if not re.match(r"Usage: |Try '|$", x)]
    assert len(lines) == 1 + (" parameters, " in lines[0])
    return lines[-1]


LONG = "x " * 5000
ROWS: list[Any] = [
    {"id": "a", "text": "import os", "k": [1]},
    "import sys",
    b"",
    {"prompt": "class Stack:", "embedding": "mine"},
    {"prompt": LONG, "id": "long"},
    b"[1]",
    {"question": "x"},
    "def f(x):",
]
TEXTS = {1: "import os", 2: "import sys", 4: "class Stack:", 8: "def f(x):"}
ERRORS = {
    5: r"^the prompt has 5,001 tokens; max_model_len is 1,024",
    6: r"^not a JSON string or object$",
    7: r"^none of 'text', 'prompt' is given$",
}
FAILED = "3 of 7 rows failed; "


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", ROWS)


def check_records(found: list[dict[str, Any]], llm: LLM) -> None:
    """The records of ROWS."""
    assert [record["line"] for record in found] == [1, 2, 4, 5, 6, 7, 8]
    by_line = {record["line"]: record for record in found}
    for line, words in ERRORS.items():
        assert re.search(words, by_line[line]["error"])
    vectors = vectors_of(llm, *TEXTS.values())
    for line, vector in zip(TEXTS, vectors, strict=True):
        assert by_line[line]["embedding"] == vector
        assert by_line[line]["num_prompt_tokens"] > 0
    assert (by_line[1]["id"], by_line[1]["k"]) == ("a", [1])
    assert by_line[4]["input_embedding"] == "mine"
    assert by_line[5]["id"] == "long"
    assert by_line[7]["question"] == "x"


def test_json_lines(shmllm: Shmllm, llm: LLM, source: Path, tmp_path: Path) -> None:
    done = shmllm("embed", "-i", source, "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout) == (1, b""), done.stderr.decode()
    check_records(records((tmp_path / "out.jsonl").read_bytes()), llm)
    message = done.stderr.decode()
    assert f"{FAILED}see `error` in their records" in message.splitlines()[-1]
    assert "embedding " in message
    assert "7/7" in message
    assert "texts/s" in message


def test_an_array(shmllm: Shmllm, llm: LLM, source: Path, tmp_path: Path) -> None:
    done = shmllm("embed", "-i", source, "-o", tmp_path / "out.npy")
    assert done.returncode == 1, done.stderr.decode()
    found = np.load(tmp_path / "out.npy")
    assert (found.dtype, found.shape) == (np.float32, (7, llm.facts.hidden_size))
    assert np.array_equal(found[[0, 1, 2, 6]], np.float32(vectors_of(llm, *TEXTS.values())))
    assert np.isnan(found[3:6]).all()
    *_, first, second, third, last = done.stderr.decode().splitlines()
    for message, (line, words) in zip((first, second, third), ERRORS.items(), strict=True):
        assert re.search(words, message.removeprefix(f"shmllm: line {line}: "))
    assert last == f"shmllm: {FAILED}their rows are NaN"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.npy"]


@needs_pyarrow
def test_a_table(shmllm: Shmllm, llm: LLM, source: Path, tmp_path: Path) -> None:
    done = shmllm("embed", "-i", source, "-o", tmp_path / "out.parquet")
    assert done.returncode == 1, done.stderr.decode()
    table = pq.read_table(tmp_path / "out.parquet")
    kind = table.schema.field("embedding").type
    assert (str(kind.value_type), kind.list_size) == ("float", llm.facts.hidden_size)
    check_records(table.to_pylist(), llm)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.parquet"]
    again = shmllm("embed", "-i", tmp_path / "out.parquet", "-o", tmp_path / "again.jsonl")
    assert again.returncode == 1
    assert (
        "none of 'text', 'prompt'" in records((tmp_path / "again.jsonl").read_bytes())[0]["error"]
    )


def test_plain_lines_pipes_and_compressed_files(shmllm: Shmllm, llm: LLM, tmp_path: Path) -> None:
    plain = b'"import os"\n\nimport sys\n'
    (tmp_path / "in.txt").write_bytes(plain)
    done = shmllm("embed", "-i", tmp_path / "in.txt")
    assert done.returncode == 0, done.stderr.decode()
    found = records(done.stdout)
    assert [(r["line"], r["index"], r["text"]) for r in found] == [
        (1, 0, '"import os"'),
        (3, 1, "import sys"),
    ]
    texts = ("import os", "import sys")
    lines = b"".join(json.dumps(text).encode() + b"\n" for text in texts)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines))
    piped = shmllm("embed", input=lines)
    packed = shmllm("embed", "-i", tmp_path / "in.jsonl.gz", "-o", "-")
    assert piped.stdout == packed.stdout
    assert [r["embedding"] for r in records(piped.stdout)] == vectors_of(llm, *texts)


@needs_pyarrow
def test_a_table_of_texts(shmllm: Shmllm, llm: LLM, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {"id": ["a", None], "text": ["import os", None], "k": [1, None]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    done = shmllm("embed", "-i", tmp_path / "in.parquet")
    first, second = records(done.stdout)
    assert (first["id"], first["embedding"], first["k"]) == ("a", *vectors_of(llm, "import os"), 1)
    assert second == {"line": 2, "error": "'text' must be a string, got null", "k": None}


def test_the_options_of_vectors(shmllm: Shmllm) -> None:
    def vectors(*options: str) -> np.ndarray:
        done = shmllm("embed", *options, input=b'"import os and sys"\n')
        assert done.returncode == 0, done.stderr.decode()
        return np.array(records(done.stdout)[0]["embedding"])

    vector, raw, mean = vectors(), vectors("--no-normalize"), vectors("--pooling-type", "MEAN")
    length = np.linalg.norm(raw)
    assert abs(length - 1) > 0.1
    np.testing.assert_allclose(raw / length, vector, atol=1e-6)
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-5)
    assert not np.allclose(mean, vector)


def test_a_shard_has_the_rows_of_its_index(shmllm: Shmllm, source: Path) -> None:
    whole = records(shmllm("embed", "-i", source).stdout)
    for index in range(2):
        part = shmllm("embed", "-i", source, "--shard", f"{index}/2")
        assert records(part.stdout) == whole[index::2]


REFUSED: dict[str, tuple[list[str], str]] = {
    "missing input": (["-i", "/no/such/file.jsonl"], "/no/such/file.jsonl.*No such file"),
    "no text": (["-i", "EMPTY"], "the input holds no text"),
    "unknown suffix": (["-i", "IN", "-o", "out.csv"], r"out.csv: .* to .jsonl, .parquet or .npy"),
    "compressed": (["-i", "IN", "-o", "out.npy.gz"], r"to .jsonl, .parquet or .npy"),
    "output is there": (["-i", "IN", "-o", "FULL"], "is not empty; --resume continues it"),
    "output of others": (["-i", "IN", "-o", "FULL", "--resume"], "line 1 of .* is not JSON"),
    "array is there": (["-i", "IN", "-o", "ARRAY", "--resume"], "exists and is complete; --overw"),
    "input is output": (["-i", "IN", "-o", "IN", "--overwrite"], "is also the input"),
    "resume a pipe": (["-i", "-", "-o", "OUT", "--resume"], "standard input is not a file"),
    "resume stdout": (["-i", "IN", "--resume"], "--resume needs a file as --output"),
    "pooling type": (["-i", "IN", "--pooling-type", "LASTT"], "pooling_type must be .*'LASTT'"),
    "dimensions": (["-i", "IN", "-o", "OUT", "--dimensions", "8"], "dimensions must be unset"),
    "both models": (["-i", "IN", "-m", "tiny"], "--model is for starting an engine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_job_prints_one_line_and_changes_no_file(
    shmllm: Shmllm, name: str, tmp_path: Path
) -> None:
    arguments, words = REFUSED[name]
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("IN", "OUT", "FULL", "EMPTY")}
    paths["ARRAY"] = tmp_path / "array.npy"
    contents = {"IN": '"x"\n', "FULL": "precious\n", "EMPTY": "\n \n", "ARRAY": "precious"}
    for key, content in contents.items():
        paths[key].write_text(content)
    done = shmllm("embed", *[paths.get(a, a) for a in arguments], input=b'"x"\n')
    assert re.search(words, refusal(done))
    assert all(paths[key].read_text() == content for key, content in contents.items())
    assert len(list(tmp_path.iterdir())) == len(contents)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line(shmllm: Shmllm, source: Path) -> None:
    for command, options in (("embed", ()), ("score", ("import",))):
        done = shmllm(command, *options, "-i", source, "-o", "/dev/full")
        assert done.returncode == 2
        assert "No space left on device" in done.stderr.decode().splitlines()[-1]
        assert "Traceback" not in done.stderr.decode()


@pytest.fixture
def many(tmp_path: Path) -> Path:
    rows = [{"text": f"x{i} = {'y ' * (i % 30)}", "id": i} for i in range(300)]
    rows[40] = rows[290] = {"text": LONG, "id": "long"}
    return write(tmp_path / "many.jsonl", rows)


@contextlib.contextmanager
def started(*arguments: str | Path, records_file: Path, num: int) -> Iterator[subprocess.Popen]:
    """A job that has written a number of records, and goes on slowly."""
    process = start_source(SLOW_CLI, *map(str, arguments), stderr=subprocess.PIPE)
    try:
        assert holds_within(lambda: num_lines(records_file) >= num, PATIENCE_S)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_killed_job_is_resumed_to_the_same_bytes(
    shmllm: Shmllm, engine: str, many: Path, tmp_path: Path, suffix: str
) -> None:
    whole, target = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    assert shmllm("embed", "-i", many, "-o", whole).returncode == 1
    written = target if suffix == "jsonl" else Path(f"{target}.partial.jsonl")
    arguments = ("embed", "-i", many, "-o", target, "--attach", engine, "--resume")
    for num in (3, 45):
        with started(*arguments, records_file=written, num=num) as process:
            process.kill()
            process.wait(PATIENCE_S)
        assert num_lines(written) < 300
        assert suffix == "jsonl" or not target.exists()
    with written.open("ab") as torn:
        torn.write(b'{"id": 3, "li')
    done = shmllm("embed", "-i", many, "-o", target, "--resume")
    assert done.returncode == 1, done.stderr.decode()
    assert "2 of 300 rows failed" in done.stderr.decode()
    assert target.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == sorted(["many.jsonl", whole.name, target.name])


def test_a_signal_keeps_finished_rows_and_says_how_to_continue(
    engine: str, many: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.npy"
    journal = Path(f"{target}.partial.jsonl")
    arguments = ("embed", "-i", many, "-o", target, "--attach", engine)
    with started(*arguments, records_file=journal, num=4) as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    message = stderr.decode()
    assert process.returncode == 130, message
    assert "Traceback" not in message
    (hint,) = [line for line in message.splitlines() if "--resume" in line]
    found = re.match(rf"(\d+) of 300 rows are in {re.escape(str(journal))};", hint)
    assert found is not None
    assert num_lines(journal) - int(found[1]) in (0, 1)  # it may not have counted the last one
    assert not target.exists()


def test_resume_refuses_other_rows_and_other_widths(
    shmllm: Shmllm, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    assert shmllm("embed", "-i", source, "-o", target).returncode == 1
    first, *others = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(first + others[0])
    record = {"id": "a", "line": 1, "embedding": [1.0], "k": [1]}
    narrow = write(tmp_path / "narrow.jsonl", [record])
    before = narrow.read_bytes()
    done = shmllm("embed", "-i", source, "-o", narrow, "--resume")
    assert done.returncode == 2
    assert narrow.read_bytes() == before
    assert "embeddings of the earlier run have 1 numbers" in done.stderr.decode()
    write(source, [{"id": "b", "text": "import os"}, "x"])
    done = shmllm("embed", "-i", source, "-o", target, "--resume")
    assert "the record of line 1 has another id or other fields" in refusal(done)


def test_the_ranking_is_that_of_score(
    shmllm: Shmllm, llm: LLM, source: Path, tmp_path: Path
) -> None:
    done = shmllm("score", "import re", "-i", source, "--json")
    assert done.returncode == 1, done.stderr.decode()
    scores = [one.outputs.score for one in llm.score("import re", [*TEXTS.values()])]
    expected = sorted(zip(scores, TEXTS.items(), strict=True), reverse=True)
    found = records(done.stdout)
    assert [(r["score"], (r["line"], r["text"])) for r in found] == expected
    assert [r["rank"] for r in found] == [1, 2, 3, 4]
    assert next(r for r in found if r["line"] == 1)["id"] == "a"
    message = done.stderr.decode()
    assert "shmllm: line 5: the document has 5,001 tokens; max_model_len is 1,024" in message
    assert "shmllm: line 6: not a JSON string or object" in message
    assert message.splitlines()[-1] == "shmllm: 3 of 7 documents failed"
    assert "7/7" in message
    target = tmp_path / "out.jsonl"
    assert shmllm("score", "import re", "-i", source, "--top", "2", "-o", target).returncode == 1
    assert records(target.read_bytes()) == found[:2]


def test_ties_are_in_the_order_of_the_lines(shmllm: Shmllm) -> None:
    done = shmllm("score", "y", "--json", input=b"x\nimport os\n" * 4)
    assert done.returncode == 0
    lines = [record["line"] for record in records(done.stdout)]
    assert sorted((lines[:4], lines[4:])) == [[1, 3, 5, 7], [2, 4, 6, 8]]


def test_a_table_of_ranks(shmllm: Shmllm, engine: str, tmp_path: Path) -> None:
    documents = [{"id": f"d{i}", "text": f"import  os{i}\n{'z ' * 100}end"} for i in range(3)]
    source = write(tmp_path / "in.jsonl", documents)
    done = shmllm("score", "import os", "-i", source, "--top", "2")
    header, *rows = done.stdout.decode().splitlines()
    assert re.fullmatch(r"rank  score +id  text", header)
    assert len(rows) == 2
    assert all(re.fullmatch(r"\d +0\.\d{4}  d\d  import os\d( z)+ end", row) for row in rows)
    command = ("score", "import os", "-i", str(source), "--attach", engine)
    with opened_terminal(*command) as terminal:
        assert terminal.ends() == 0
    shown = [line.rstrip() for line in terminal.screen.display if " d1 " in line]
    assert len(shown) == 1
    assert shown[0].endswith("…")
    assert len(shown[0]) <= 80


def test_an_interrupted_ranking_leaves_no_output(engine: str, tmp_path: Path) -> None:
    source, target = tmp_path / "documents", tmp_path / "out.jsonl"
    os.mkfifo(source)
    pipe = os.open(source, os.O_RDWR)  # the command waits for further documents
    arguments = ("score", "q", "-i", str(source), "-o", str(target), "--attach", engine)
    process = start_source(CLI, *arguments, stderr=subprocess.PIPE)
    try:
        os.write(pipe, b"x\n" * 300)
        assert process.stderr is not None
        with watched(process):
            assert b" parameters, " in process.stderr.readline()
        assert target.exists()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        kill(process)
        os.close(pipe)
    assert process.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr
    assert not target.exists()


@pytest.mark.parametrize("command", [("embed",), ("score", "q")], ids=str)
def test_a_terminal_is_no_input(command: tuple[str, ...]) -> None:
    with opened_terminal(*command) as terminal:
        assert terminal.ends() == 2
    assert b"no texts; give a file as --input, or pipe them" in terminal.output


REFUSED_SCORES: dict[str, tuple[list[str], str]] = {
    "missing input": (["q", "-i", "/no/such/file.txt"], "/no/such/file.txt.*No such file"),
    "no text": (["q", "-i", "EMPTY"], "the input holds no text"),
    "no piped text": (["q", "-m", "no/such/model"], "the input holds no text"),
    "drafts": (["q", "-i", "IN", "--draft", "ngram"], "--draft is for commands that generate"),
    "output is there": (["q", "-i", "IN", "-o", "FULL"], "is not empty; --overwrite replaces it"),
    "input is output": (["q", "-i", "IN", "-o", "IN", "--overwrite"], "is also the input"),
    "array": (["q", "-i", "IN", "-o", "out.npy"], "out.npy: scores are written as JSON lines"),
    "query": ([LONG, "-i", "IN", "-o", "OUT"], "the query has 5,001 tokens; max_model_len is"),
    "empty query": (["", "-i", "IN", "-o", "OUT"], "the query is empty"),
}


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_a_refused_ranking_prints_one_line_and_changes_no_file(
    shmllm: Shmllm, name: str, tmp_path: Path
) -> None:
    arguments, words = REFUSED_SCORES[name]
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("IN", "OUT", "FULL", "EMPTY")}
    contents = {"IN": '"x"\n', "FULL": "precious\n", "EMPTY": "\n \n"}
    for key, content in contents.items():
        paths[key].write_text(content)
    done = shmllm("score", *[str(paths.get(a, a)) for a in arguments])
    assert re.search(words, refusal(done))
    assert all(paths[key].read_text() == content for key, content in contents.items())
    assert len(list(tmp_path.iterdir())) == len(contents)
