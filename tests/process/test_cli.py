"""`shmllm generate` as a shell sees it: stdout, stderr, exit codes and error messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import shmllm
from support.engines import assert_unused
from support.programs import (
    CLI,
    ELSEWHERE,
    children,
    environment,
    is_running,
    python,
    watched,
)
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

Generate = Callable[..., str]
PROMPT = "def fibonacci(n):"
GREEDY = ("--temperature", "0", "--max-tokens", "8")
ENDLESS = ("--ignore-eos", "--max-tokens", "900")
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + CLI
)  # a shell's background jobs, and what they start, ignore SIGINT


@pytest.fixture
def attached(engine: str) -> Iterator[tuple[str, str]]:
    """Options that attach a command to the engine of the module, which the test must leave idle."""
    yield "--attach", engine
    assert_unused(engine)


@pytest.fixture
def generate(attached: tuple[str, str]) -> Generate:
    """Runs `shmllm generate`, which must succeed, and returns its stdout."""

    def run(*arguments: str, **options: Any) -> str:
        done = shmllm("generate", *arguments, *attached, **options)
        assert done.returncode == 0, done.stderr.decode()
        return str(done.stdout.decode())

    return run


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(multiprocess=False, dtype="float32") as llm:
        yield llm


def outputs_of(llm: LLM, prompts: list[Any], **options: Any) -> list[RequestOutput]:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 8} | options))
    return llm.generate(prompts, params, use_tqdm=False)


def text_of(llm: LLM, prompt: Any, **options: Any) -> str:
    return outputs_of(llm, [prompt], **options)[0].outputs[0].text


def ended(text: str) -> str:
    """A text as the command writes it, with exactly one newline at its end."""
    return text if text.endswith("\n") else text + "\n"


def test_one_prompt_is_text_on_stdout_and_the_rest_on_stderr(llm: LLM) -> None:
    done = python("-c", CLI, "generate", PROMPT, *GREEDY)
    assert done.returncode == 0
    assert done.stdout.decode() == ended(text_of(llm, PROMPT))
    message = done.stderr.decode()
    assert "M parameters" in message
    assert "\x1b" not in message


def test_several_prompts_are_separated_and_in_order(llm: LLM, attached: tuple[str, str]) -> None:
    prompts = ["import os", PROMPT, "class Stack:"]
    done = shmllm("generate", *prompts, *GREEDY, *attached)
    assert done.returncode == 0
    expected = [text_of(llm, prompt).rstrip("\n") + "\n" for prompt in prompts]
    assert done.stdout.decode() == "---\n".join(expected)
    assert "3/3" in done.stderr.decode()
    assert "prefix hits" in done.stderr.decode()


def test_a_file_of_plain_lines(llm: LLM, generate: Generate, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("import os\n\n{'no': json}\r\nné\n", encoding="utf-8")
    found = records(generate("-i", str(path), "--json", *GREEDY))
    assert [record["prompt"] for record in found] == ["import os", "{'no': json}", "né"]
    assert [record["text"] for record in found] == [
        text_of(llm, prompt) for prompt in ("import os", "{'no': json}", "né")
    ]


def test_standard_input_is_the_prompt_or_the_file(llm: LLM, generate: Generate) -> None:
    text = "class Stack:\n    def"
    assert generate(*GREEDY, input=text.encode()) == ended(text_of(llm, text))
    found = records(generate("-i", "-", "--json", *GREEDY, input=text.encode()))
    assert [record["prompt"] for record in found] == ["class Stack:", "    def"]


def test_the_command_is_installed_under_its_name() -> None:
    done = python("-c", CLI, "--version")
    assert re.fullmatch(r"shmllm, version \d+\.\d+\.\d+\S*\n", done.stdout.decode())
    assert b"Examples:" in shmllm("generate", "--help").stdout
    module = [sys.executable, "-P", "-m", "shmllm", "--version"]
    assert subprocess.run(module, capture_output=True, check=True).stdout == done.stdout


def test_a_stop_string_ends_the_text_before_it(llm: LLM, generate: Generate) -> None:
    whole = text_of(llm, PROMPT, max_tokens=24)
    stop = whole.strip()[-2:]
    expected = whole[: whole.index(stop)]
    found = generate(PROMPT, "--temperature", "0", "--max-tokens", "24", "--stop", stop)
    assert found == ended(expected)


def test_a_seed_repeats_and_another_differs(llm: LLM, generate: Generate) -> None:
    """The other run of the same seed is in this process."""
    sampled = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    options = ("--temperature", "1.5", "--max-tokens", "24", "--ignore-eos")
    found = generate(PROMPT, "--seed", "5", *options)
    assert found == ended(text_of(llm, PROMPT, seed=5, **sampled))
    assert found != ended(text_of(llm, PROMPT, seed=6, **sampled))


def test_chat_with_a_system_message(llm: LLM, generate: Generate) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Reverse a list."}
    with_system, without = (
        llm.front_end.chat_prompt([system, user]),
        llm.front_end.chat_prompt([user]),
    )
    assert with_system != without
    found = generate("Reverse a list.", "--system", "Be brief.", "--echo", *GREEDY)
    assert found == ended(str(with_system["prompt"]) + text_of(llm, with_system))
    found = generate("--chat", "--echo", *GREEDY, input=b"Reverse a list.")
    assert found == ended(str(without["prompt"]) + text_of(llm, without))


def test_several_completions_are_shown_apart(llm: LLM, generate: Generate) -> None:
    sampled = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 8}
    found = generate(PROMPT, "import os", "-n", "2", "--seed", "3", "--max-tokens", "8")
    shown = []
    for output in outputs_of(llm, [PROMPT, "import os"], **sampled):
        texts = [one.text.rstrip("\n") for one in output.outputs]
        assert texts[0] != texts[1]
        shown.append("".join(f"[{i} of 2]\n{text}\n" for i, text in enumerate(texts, 1)))
    assert found == "---\n".join(shown)


def test_logprobs_are_a_table_below_the_text(llm: LLM, generate: Generate) -> None:
    (output,) = outputs_of(llm, [PROMPT], logprobs=2)
    (completion,) = output.outputs
    found = generate(PROMPT, "--logprobs", "2", *GREEDY)
    assert found.startswith(ended(completion.text) + "\ntoken ")
    lines = found[len(ended(completion.text)) :].splitlines()[2:]
    for line, position in zip(lines, completion.logprobs, strict=True):
        chosen, *others = (
            rf"{re.escape(json.dumps(e.decoded_token))} +{e.logprob:.3f}" for e in position.values()
        )
        assert re.fullmatch("  ".join([chosen, *others]), line)


def test_a_chat_template_of_a_file(llm: LLM, generate: Generate, tmp_path: Path) -> None:
    path = write(tmp_path, "template", b"{% for m in messages %}<{{ m.content }}>{% endfor %}def")
    found = generate("a", "--chat-template", path, "--echo", *GREEDY)
    assert found == ended("<a>def" + text_of(llm, "<a>def"))
    (record,) = records(generate("a", "--chat-template", path, "--json", *GREEDY))
    assert record["text"] == text_of(llm, "<a>def")


def test_a_constraint_of_the_command_line_holds(generate: Generate) -> None:
    assert generate("x", "--choice", "red", "--choice", "green", *GREEDY) in ("red\n", "green\n")


def test_a_priority_needs_an_engine_with_priorities(attached: tuple[str, str]) -> None:
    done = shmllm("generate", "x", "--priority", "1", *attached)
    assert done.returncode == 2
    assert b"--scheduling-policy priority" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PROMPT, *GREEDY), "the text was cut off after 8 tokens; a larger --max-tokens"),
        ((PROMPT, PROMPT, *GREEDY), "2 of 2 texts were cut off after 8 tokens"),
        ((PROMPT, "--max-tokens", "2000", "--ignore-eos"), "cut off by max_model_len, 1,024"),
        slow((PROMPT, "--json", *GREEDY), ""),
        slow(("x", "--choice", "red", *GREEDY), ""),
    ],
)
def test_a_text_that_ended_by_a_limit_says_so(
    arguments: tuple[str, ...], message: str, attached: tuple[str, str]
) -> None:
    done = shmllm("generate", *arguments, *attached)
    assert done.returncode == 0
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("shmllm: ")]
    assert len(lines) == bool(message)
    assert message in "".join(lines)


def test_echo_writes_utf8_in_the_locale_of_cron_jobs(llm: LLM, generate: Generate) -> None:
    prompt = "# naïve € "
    found = generate(prompt, "--echo", *GREEDY, env={"LC_ALL": "C"})
    assert found == ended(prompt + text_of(llm, prompt))


def start(*arguments: str, source: str = INTERRUPTIBLE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", source, "generate", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ELSEWHERE,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((PROMPT, *ENDLESS), id="streamed"),
        pytest.param((PROMPT, "import os", *GREEDY), id="batch"),
        pytest.param((PROMPT, "--json", *GREEDY), id="json", marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_ends_the_command_without_an_error(
    arguments: tuple[str, ...], attached: tuple[str, str]
) -> None:
    """As in `| head -c 1`: the reader has what it wanted, and that is no error."""
    process = start(*arguments, *attached)
    assert process.stdout is not None
    assert process.stderr is not None
    with watched(process):
        if "--ignore-eos" in arguments:
            assert process.stdout.read(1)
        process.stdout.close()
        message = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in message
    assert "BrokenPipe" not in message


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    with watched(process):
        return process.stdout.read(1)


@pytest.mark.parametrize("moment", ["streaming", "starting"])
def test_an_interrupt_ends_with_130_and_leaves_nothing(moment: str) -> None:
    process = start(PROMPT, *ENDLESS)
    if moment == "streaming":
        assert first_byte(process)
    else:
        assert holds_within(lambda: bool(children(process.pid)), PATIENCE_S)
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert b"Traceback" not in message
    assert message.decode().strip().endswith("interrupted")
    # An interrupt between fork and exec leaves nobody who knows the engine: it ends by itself.
    assert holds_within(lambda: not is_running(engine), PATIENCE_S)


def test_a_killed_engine_ends_with_3_and_one_line() -> None:
    process = start(PROMPT, PROMPT, "--json", *ENDLESS)
    assert holds_within(lambda: bool(children(process.pid)), PATIENCE_S)
    (engine,) = children(process.pid)
    assert process.stderr is not None
    with watched(process):
        process.stderr.readline()  # what the engine is; it is ready
    os.kill(engine, signal.SIGKILL)
    _, message = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    lines = [line for line in message.decode().splitlines() if line.startswith("shmllm: ")]
    (line,) = lines
    assert "SIGKILL" in line
    assert b"Traceback" not in message


def write(tmp_path: Path, name: str, content: bytes) -> str:
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


BAD_INPUT: dict[str, tuple[list[str], bytes | None, str]] = {
    "unknown model": (["-m", "no/such/model", "x"], None, "'no/such/model' not found: looked for"),
    "model is a file": (["-m", "FILE", "x"], b"x", "is a file"),
    "temperature": (["x", "--temperature", "9"], None, "temperature must be .*got 9.0"),
    "top_p": (["x", "--top-p", "0"], None, "top_p must be .*got 0.0"),
    "max_tokens": (["x", "--max-tokens", "0"], None, "max_tokens must be .*got 0"),
    "seed": (["x", "--seed", str(2**80)], None, "seed must be"),
    "stop": (["x", "--stop", ""], None, "stop must be"),
    "empty prompt": ([""], None, "prompt 1 is empty"),
    "empty stdin": ([], None, "standard input is empty"),
    "long prompt": (["x " * 5000], None, r"prompt 1 has [\d,]+ tokens; max_model_len is"),
    "missing file": (["-i", "/no/such/file"], None, "/no/such/file.*No such file"),
    "empty file": (["-i", "FILE"], b"\n\n", "the input holds no prompt"),
    "not UTF-8": (["-i", "FILE"], b"good\nbad \xff\n", "UTF-8|utf-8"),
    "unknown option": (["x", "--temprature", "1"], None, "'--temprature'"),
    "not a number": (["x", "--max-tokens", "many"], None, "'many' is not a valid integer"),
    "two sources": (["x", "-i", "FILE"], b"x", "not both"),
    "no such folder": (["x", "-o", "/no/such/folder/out"], None, "/no/such/folder/out"),
    "KV memory": (["x", "--kv-cache-memory-bytes", "1"], None, "kv_cache_memory_bytes is 1 and"),
}
# These are found when an engine has answered; that of the test's own is for the others.
ATTACHED = ("empty prompt", "empty stdin", "long prompt", "no such folder")
# These come to the shell in the same way as another one that is refused.
LIKE_OTHERS = (
    "model is a file",
    "top_p",
    "max_tokens",
    "seed",
    "stop",
    "not a number",
    "KV memory",
)
USAGE = re.compile(r"Usage: |Try '|\s*$")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ())
        for name in BAD_INPUT
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    name: str, attached: tuple[str, str], tmp_path: Path
) -> None:
    arguments, content, message = BAD_INPUT[name]
    if name in ATTACHED:
        arguments = [*arguments, *attached]
    path = write(tmp_path, "input", content) if content is not None else ""
    done = shmllm("generate", *(path if a == "FILE" else a for a in arguments))
    assert done.returncode == 2, done.stderr.decode()
    assert done.stdout == b""
    lines = [line for line in done.stderr.decode().splitlines() if not USAGE.match(line)]
    assert len(lines) == 1, done.stderr.decode()
    assert re.search(message, lines[0])
    assert lines[0].startswith(("shmllm: ", "Error: "))
    if name == "unknown option":
        assert b"Usage: shmllm generate" in done.stderr


def test_stdin_that_is_no_text_is_one_line_and_exit_code_2(attached: tuple[str, str]) -> None:
    done = shmllm("generate", *attached, input=b"\xff\xfe\x00", env={"PYTHONUTF8": "1"})
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_texts_replace_a_file_only_if_that_is_asked_for(
    attached: tuple[str, str], tmp_path: Path
) -> None:
    target, source = tmp_path / "texts.txt", tmp_path / "prompts.txt"
    target.write_text("of yesterday\n")
    source.write_text("x\ny\n")
    forced = ("--choice", "red", *attached)
    for arguments in (("x",), ("x", "y"), ("-i", str(source))):
        done = shmllm("generate", *arguments, "-o", str(target), *forced)
        assert done.returncode == 2
        assert b"texts.txt is not empty; --overwrite replaces it" in done.stderr
    assert target.read_text() == "of yesterday\n"
    onto_itself = ("-i", str(source), "-o", str(source), "--overwrite")
    assert b"is also the input" in shmllm("generate", *onto_itself, *forced).stderr
    done = shmllm("generate", "x", "y", "-o", str(target), "--overwrite", *forced)
    assert (done.returncode, target.read_text()) == (0, "red\n---\nred\n")
    assert source.read_text() == "x\ny\n"


def test_bad_input_leaves_the_output_file_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "results.jsonl"
    target.write_text("of yesterday\n")
    for arguments in (["-m", "no/such/model", "x"], ["x", ""]):
        assert shmllm("generate", *arguments, "-o", str(target)).returncode == 2
        assert target.read_text() == "of yesterday\n"


def test_debug_shows_the_traceback() -> None:
    done = python("-c", CLI, "--debug", "generate", "-m", "no/such/model", "x")
    assert done.returncode != 0
    assert b"Traceback" in done.stderr
    assert b"EngineStartError" in done.stderr
