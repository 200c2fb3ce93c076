"""The programs in the documents and examples run from an empty directory."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.audio_models import make_audio_model
from support.vision_models import make_vision_model

from shmllm.compat import vllm
from shmllm.frontend import front_end

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
DOCUMENTS = [
    "README.md",
    *("docs/clients.md", "docs/ipc.md", "docs/python.md", "docs/speculation.md"),
    *("docs/structured-outputs.md", "docs/tools.md"),
]
Run = Callable[..., str]
TIMEOUT_S = 120
MOST_LINES = {
    "openai_bridge.py": 80,
    "policy_gradient.py": 80,
    "grpo_colocate.py": 62,
    "ray_data.py": 106,
    "retrieve.py": 75,
    "disk_connector.py": 119,
}


def run(program: Path, directory: Path, *arguments: str) -> str:
    """Run a program, which must succeed and write something; return its stdout."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()
    return done.stdout


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["same process", "process"]
)
def run_program(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """As `run`. By default a program and its engine are in this process, which has imported torch
    already."""
    start = front_end.start_engine

    def start_here(options: Any, config: Any) -> Any:
        return start(replace(options, multiprocess=False), config)

    def run_here(program: Path, *arguments: str) -> str:
        monkeypatch.setattr(front_end, "start_engine", start_here)
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        monkeypatch.chdir(tmp_path)
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            vllm.uninstall()  # a program may call its `install`
        out: str = capfd.readouterr().out
        assert out.strip()
        return out

    def run_apart(program: Path, *arguments: str) -> str:
        return run(program, tmp_path, *arguments)

    return run_apart if request.param else run_here


@pytest.fixture
def run_example(run_program: Run) -> Run:
    return lambda name, *arguments: run_program(REPOSITORY / "examples" / name, *arguments)


def test_basic_completes_every_prompt(tmp_path: Path) -> None:
    out = run(REPOSITORY / "examples" / "basic.py", tmp_path)
    assert out.count("===") == 3
    assert "def fibonacci(n):" in out
    assert not list(tmp_path.iterdir())


def test_chat_hits_the_prefix_cache(run_example: Run) -> None:
    cached = re.findall(r"\((\d+) of \d+ tokens cached\)", run_example("chat.py"))
    first, second = map(int, cached)
    assert first == 0
    assert second > 0


def test_prefix_caching_reports_hits(run_example: Run) -> None:
    out = run_example("prefix_caching.py")
    first, again, other_ending, other_salt, after_reset = map(int, re.findall(r": (\d+)", out))
    assert first == other_salt == after_reset == 0
    assert again > 0
    assert again % 16 == 0
    assert other_ending >= again


def test_retrieve_reads_a_thousand_texts_and_orders_the_nearest(run_example: Run) -> None:
    found, again = run_example("retrieve.py").split("\n\n")
    assert found.startswith("nearest of 1000 to 'remove a directory")
    texts = re.findall(r"^  (\w[^:]+: .{20,})$", found, re.MULTILINE)
    scores = [float(score) for score in re.findall(r"^  (\d\.\d{3})  \w", again, re.MULTILINE)]
    assert len({*texts}) == len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert 0 <= scores[-1] < scores[0] <= 1


def test_disk_connector_finds_the_blocks_of_another_engine(
    run_example: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    first, second = map(int, re.findall(r": (\d+) of \d+ tokens", run_example("disk_connector.py")))
    assert first == 0
    assert second > 0


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llava")
    make_vision_model("llava", directory)
    return str(directory)


def test_a_sound_is_heard(run_example: Run, tmp_path: Path) -> None:
    make_audio_model(tmp_path / "model")
    assert "prompt tokens)" in run_example("audio.py", str(tmp_path / "model"))


def test_images_are_read_once(run_example: Run, vision_model: str, tmp_path: Path) -> None:
    out = run_example("images.py", vision_model)
    cached = re.findall(r"\((\d+) of \d+ prompt tokens cached\)", out)
    first, again = map(int, cached)
    assert first == 0 < again
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    assert run_example("images.py", vision_model, "a.png", "What?").count("cached)") == 2


def test_images_jsonl_describes_a_folder_and_can_be_repeated(
    vision_model: str, tmp_path: Path
) -> None:
    (tmp_path / "pictures" / "sub").mkdir(parents=True)
    for number, name in enumerate(("a.png", "sub/b.jpg")):
        Image.new("RGB", (30, 20), (90 * number, 0, 0)).save(tmp_path / "pictures" / name)
    program = REPOSITORY / "examples" / "images_jsonl.py"
    out = run(program, tmp_path, vision_model, "pictures")
    assert {*re.findall(r"^(\S+\.(?:png|jpg)): ", out, re.MULTILINE)} == {"a.png", "sub/b.jpg"}
    assert run(program, tmp_path, vision_model, "pictures") == out


def test_sampling_does_not_depend_on_the_batch(run_example: Run) -> None:
    out = run_example("sampling.py")
    assert out.rstrip().endswith("same tokens alone and in the batch: True")
    texts = re.findall(r"^seed \d: (.*)$", out, re.MULTILINE)
    assert len(texts) == 6
    assert len(set(texts)) > 1


def test_speculative_needs_fewer_steps_for_the_same_text(run_example: Run) -> None:
    out = run_example("speculative.py")
    found = re.findall(r"^(.*): (\d+) tokens in (\d+) steps", out, re.MULTILINE)
    (plain, tokens, steps), *drafting = found
    assert (plain, tokens) == ("no drafts", steps)
    assert [name for name, _, _ in drafting] == ["ngram", "suffix"]
    assert all(int(count) < int(steps) for _, _, count in drafting)
    assert len(re.findall(r"% of \d+ drafted tokens accepted$", out, re.MULTILINE)) == 2
    assert out.rstrip().endswith("same text: True")


def test_batch_file_writes_a_line_for_each(tmp_path: Path, run_example: Run) -> None:
    run_example("batch_file.py")
    prompts, completions = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "completions.jsonl")
    )
    assert prompts
    assert [c["prompt"] for c in completions] == [p["prompt"] for p in prompts]
    assert all(c["finish_reason"] in ("stop", "length") for c in completions)


def test_streaming_shows_failures_order_and_pieces(run_example: Run) -> None:
    out = run_example("streaming.py")
    failed = re.findall(r"failed: prompt (\d+) is empty", out)
    assert sorted(map(int, failed)) == [0, 50, 100, 150]
    assert "'error': 4" in out
    assert "first [0, 1, 2, 3, 4]" in out
    assert len(out.partition("Token by token:\n")[2].strip()) > 20


def test_async_llm_cancels_aborts_and_pauses(run_example: Run) -> None:
    out = run_example("async_llm.py")
    assert out.count("===") == 3
    assert "ended by: abort" in out
    assert "done while paused: False" in out
    assert int(re.findall(r"characters after resuming: (\d+)", out)[0]) > 0


def test_structured_outputs_match(run_example: Run) -> None:
    out = run_example("structured_outputs.py")
    person, date, choice, total, age, refusal = out.splitlines()
    assert all(line.endswith(" stop") for line in (person, date, choice, total))
    assert json.loads(person.removeprefix("json").removesuffix("stop"))["age"] == int(age)
    assert re.fullmatch(r"regex +\d{4}-\d\d-\d\d stop", date)
    assert choice.split()[1] in ("positive", "negative", "neutral")
    assert "uniqueItems" in refusal


def test_embed_ranks_by_similarity(run_example: Run) -> None:
    out = run_example("embed.py")
    assert out.count("256 components") == 3
    scores = [float(score) for score in re.findall(r"^(\d\.\d+)  ", out, re.MULTILINE)]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    assert out.rstrip().endswith("import unittest")


def test_beam_search_finds_what_greedy_does_not(run_example: Run) -> None:
    out = run_example("beam_search.py")
    scores = [float(score) for score in re.findall(r"^ *(-\d+\.\d+) ", out, re.MULTILINE)]
    *beams, greedy = scores
    assert len(beams) == 4
    assert beams == sorted(beams, reverse=True)
    assert beams[0] >= greedy


def test_load_weights_changes_the_model_and_back(run_example: Run) -> None:
    out = run_example("load_weights.py")
    shown = dict(re.findall(r"^version (.*?): (.*)$", out, re.MULTILINE))
    assert list(shown) == ["0", "1", "as loaded"]
    assert shown["0"] == shown["as loaded"] != shown["1"]
    assert re.search(
        r"refused: model.norm.weight has shape \[3\].* no weight 'model.norm.bias'", out
    )
    assert out.rstrip().endswith("same text as at the start: True")


@pytest.mark.parametrize("num_steps", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_policy_gradient_samples_from_its_policy_and_learns(
    run_example: Run, num_steps: int
) -> None:
    out = run_example("policy_gradient.py", "--steps", str(num_steps))
    lines = re.findall(r"^ +\d+ +(\d\.\d+) +(\S+) +\S+$", out, re.MULTILINE)
    rewards, differences = ([float(each) for each in column] for column in zip(*lines, strict=True))
    assert len(rewards) == num_steps
    assert max(differences) < 1e-3
    if num_steps == 16:
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.3


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("grpo_colocate.py", "trl", "pip install trl peft"),
        ("openai_bridge.py", "uvicorn", "pip install starlette uvicorn"),
        ("ray_data.py", "ray", "pip install 'ray[data]>=2.60,<2.64'"),
        ("ray_processor.py", "ray", "pip install 'ray[data]'"),
    ],
)
def test_a_package_that_an_example_lacks_is_one_line_with_the_command(
    name: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "examples" / name))
    line = str(ended.value)
    assert line.startswith(f"{name} needs ")
    assert command in line
    assert "\n" not in line


def test_every_example_is_tested_here() -> None:
    files = [Path(__file__), *(REPOSITORY / "tests" / "clients").glob("test_*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert EXAMPLES
    for path in EXAMPLES:
        assert re.search(rf'(run_example\(|"examples" / )"{path.name}"', source)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES.get(path.name, 59)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_the_documents_runs(document: str, tmp_path: Path, run_program: Run) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block, encoding="utf-8")
        run_program(program)


def test_python_in_the_document_of_images_runs(
    run_program: Run, vision_model: str, tmp_path: Path
) -> None:
    text = (REPOSITORY / "docs" / "images.md").read_text(encoding="utf-8")
    (tmp_path / "my-vlm").symlink_to(vision_model)
    Image.new("RGB", (30, 20)).save(tmp_path / "cat.png")
    program = tmp_path / "block.py"
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        program.write_text(block, encoding="utf-8")
        run_program(program)


def test_links_in_the_documents_lead_somewhere() -> None:
    documents = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_ci_runs_the_second_set_up_line() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^pip install .*$", readme, re.MULTILINE)
    assert f'SET_UP="{lines[1]}"\n' in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
