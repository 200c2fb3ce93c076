"""Checkpoints whose LM head differs from the embedding table, although config.json ties them: the
tokens are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.reference_models import greedy_tokens, make_model, make_prompts
from transformers import AutoModelForCausalLM

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.errors import QuantizeError
from shmllm.quantize.source import Source

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = make_prompts(97)[1]


def with_head(kind: str, directory: Path, seed: int | None = None) -> Path:
    """A tied model; with a seed, its LM head has random numbers of its own."""
    make_model(kind, directory, tie_word_embeddings=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    table = next(tensors[name] for name in TABLES if name in tensors)
    noise = 0 if seed is None else torch.randn(table.shape, generator=generator(seed))
    save_file(tensors | {"lm_head.weight": table + noise}, file, metadata={"format": "pt"})
    return directory


TABLES = ("model.embed_tokens.weight", "transformer.wte.weight")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens_of(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def tokens_of_transformers(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return greedy_tokens(model, PROMPT, 12)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_the_own_head_is_used_with_a_warning(kind: str, tmp_path: Path) -> None:
    directory = with_head(kind, tmp_path, seed=1)
    with LLM(str(directory), **LOCAL) as llm:
        found = tokens_of(llm)
        (warning,) = llm.front_end.info.warnings
        assert "differs from the embeddings" in warning
    assert found == tokens_of_transformers(directory)
    with LLM(str(directory), **LOCAL, hf_overrides={"tie_word_embeddings": True}) as llm:
        assert tokens_of(llm) != found
        assert not llm.front_end.info.warnings


def test_two_ranks_have_parts_of_the_own_head(tmp_path: Path) -> None:
    directory = with_head("qwen3", tmp_path, seed=1)
    with LLM(str(directory), dtype="float32", tensor_parallel_size=2) as llm:
        assert tokens_of(llm) == tokens_of_transformers(directory)


def test_a_stored_copy_of_the_table_stays_tied(tmp_path: Path) -> None:
    directory = with_head("qwen3", tmp_path)
    with LLM(str(directory), **LOCAL) as llm:
        assert tokens_of(llm) == tokens_of_transformers(directory)
        assert not llm.front_end.info.warnings


def test_a_tied_model_reloads_no_own_head(tmp_path: Path) -> None:
    tied, other = with_head("qwen3", tmp_path / "tied"), with_head("qwen3", tmp_path / "own", 1)
    with LLM(str(tied), **LOCAL) as llm:
        before = tokens_of(llm)
        with pytest.raises(EngineStartError, match="one matrix for both: start another engine"):
            llm.collective_rpc("reload_weights", args=(str(other),))
        assert tokens_of(llm) == before


def test_a_module_of_transformers_says_what_to_write(tmp_path: Path) -> None:
    message = 'lm_head.weight, which differs .* "tie_word_embeddings": false there'
    with pytest.raises(EngineStartError, match=message):
        LLM(str(with_head("qwen3", tmp_path, seed=1)), **LOCAL, model_impl="transformers")


def test_quantize_says_what_to_write(tmp_path: Path) -> None:
    source = Source.find(str(with_head("qwen3", tmp_path, seed=1)))
    message = 'write "tie_word_embeddings": false there'
    with pytest.raises(QuantizeError, match=message), source.open():
        pass
