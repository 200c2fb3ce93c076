"""`shmllm quantize` as users run it: an engine runs the file, and a kill leaves none."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.programs import CLI, kill, start_source
from support.quantize_helpers import writable_model
from support.reference_models import MAX_TOKENS, ReferenceModel, make_prompts
from support.waiting import PATIENCE_S, holds_within
from transformers import AutoModelForCausalLM

from shmllm import LLM, SamplingParams
from shmllm.quantize.job import quantize

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SLOW = f"""
import time
from shmllm.quantize.drift import Drift
add = Drift.add
def add_and_wait(*arguments):
    add(*arguments)
    time.sleep(0.5)
Drift.add = add_and_wait
{CLI}
"""
"""CLI that takes seconds for a small model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without biases, which transformers drops when it reads a GGUF file."""
    directory = tmp_path_factory.mktemp("model")
    writable_model("llama", directory, attention_bias=False)
    return directory


def has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@pytest.fixture
def file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("shmllm.frontend.gguf.directory._places", lambda: [tmp_path / "cache"])
    quantize(str(model), tmp_path / "m.gguf", "gguf-q4_0")
    return tmp_path / "m.gguf"


def with_rounded_matrices(model: Path) -> Any:
    """transformers' model with weights that the `gguf` package has rounded row by row."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    kind = gguf.GGMLQuantizationType.Q4_0
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                rounded = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(rounded, kind)))
    return loaded


def read_by_transformers(file: Path) -> Any:
    pytest.importorskip("accelerate")
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")


@pytest.mark.parametrize("reader", ["checkpoint", "file"])
def test_an_engine_generates_transformers_tokens_from_the_file(
    reader: str, model: Path, file: Path
) -> None:
    loaded = with_rounded_matrices(model) if reader == "checkpoint" else read_by_transformers(file)
    prompts = make_prompts(4096, 40)[:6]
    reference = ReferenceModel(loaded.eval(), model, prompts)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    options: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
    with LLM(str(file), dtype="float32", **options) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, greedy, use_tqdm=False)
    reference.assert_greedy([output.outputs[0].token_ids for output in outputs])


def test_a_kill_in_the_middle_leaves_no_file(model: Path, tmp_path: Path) -> None:
    out, unfinished = tmp_path / "m.gguf", tmp_path / ".m.gguf.unfinished"
    process = start_source(SLOW, "quantize", str(model), str(out), "--format", "gguf-q8_0")
    try:
        assert holds_within(lambda: has_bytes(unfinished), PATIENCE_S)
    finally:
        kill(process)
    assert process.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == [unfinished.name]
    quantize(str(model), out, "gguf-q8_0")
    assert [each.name for each in tmp_path.iterdir()] == [out.name]
