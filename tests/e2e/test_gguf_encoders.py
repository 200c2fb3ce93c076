"""Encoders from GGUF files: their vectors are those of transformers' models, and llama.cpp's."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.gguf_encoders import POOLINGS, write_encoder
from support.gguf_models import Change, write_model
from support.reference_models import make_model
from support.variants import slow
from torch import Tensor

from shmllm import LLM
from shmllm.errors import EngineStartError
from tests.e2e.test_llama_cpp import context_of

GEMMA = {"query_pre_attn_scalar": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "CLS", {}),
    "xlm_roberta": ("xlm_roberta", "CLS", {}),
    "nomic_bert": ("nomic_bert", "MEAN", {}),
    "gemma3": ("gemma3", "MEAN", GEMMA),
    "jina_bert": ("jina_bert", "MEAN", {}),
    "modernbert": ("modernbert", "CLS", {}),
    "modernbert silu": ("modernbert", "CLS", {"hidden_activation": "silu"}),
    "eurobert": ("eurobert", "MEAN", {}),
}
QUICK = ("bert", "nomic_bert")
LENGTHS = 1, 7, 40, 100


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(5, 300) for _ in range(length)] for length in LENGTHS]


def unit(vector: Tensor) -> NDArray[np.float32]:
    return (vector / vector.norm()).float().numpy()


@torch.inference_mode()
def expected(model: Any, pooling: str, *dense: Tensor) -> list[NDArray[np.float32]]:
    """transformers' vectors of `prompts`."""
    found = []
    for prompt in prompts():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
        vector = {"CLS": states[0], "MEAN": states.mean(0), "LAST": states[-1]}[pooling]
        for matrix in dense:
            vector = matrix @ vector
        found.append(unit(vector))
    return found


def embedded(file: Path) -> list[NDArray[np.float32]]:
    tokens: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(file), dtype="float32", skip_tokenizer_init=True) as llm:
        outputs = llm.embed(tokens, use_tqdm=False)
    return [np.array(output.outputs.embedding, np.float32) for output in outputs]


def written(case: str, tmp_path: Path, change: Change | None = None) -> tuple[Any, str, Path]:
    kind, pooling, config = CASES[case]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(POOLINGS[pooling])
        if change is not None:
            change(writer)

    file = tmp_path / "m.gguf"
    return write_encoder(kind, tmp_path / "model", file, fill, **config), pooling, file


@pytest.mark.parametrize("case", [each if each in QUICK else slow(each) for each in CASES])
def test_its_vectors_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, pooling, file = written(case, tmp_path)
    for found, wanted in zip(embedded(file), expected(model, pooling), strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_projections_behind_the_pooling_are_those_of_the_file(tmp_path: Path) -> None:
    first, last = torch.randn(96, 64), torch.randn(48, 96)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("dense_2.weight", first.numpy())
        writer.add_tensor("dense_3.weight", last.numpy())

    model, pooling, file = written("gemma3", tmp_path, change)
    wanted = expected(model, pooling, first, last)
    for found, each in zip(embedded(file), wanted, strict=True):
        np.testing.assert_allclose(found, each, atol=5e-6)


def test_a_decoder_whose_file_names_a_pooling_makes_vectors(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path / "model")
    file = tmp_path / "m.gguf"
    write_model(file, model, lambda writer: writer.add_pooling_type(gguf.PoolingType.LAST))
    for found, wanted in zip(embedded(file), expected(model.model, "LAST"), strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-6)


@pytest.mark.parametrize("labels", [1, slow(3)])
def test_a_classifier_makes_scores(labels: int, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    model = write_encoder(
        "xlm_roberta",
        tmp_path / "model",
        file,
        lambda writer: writer.add_pooling_type(gguf.PoolingType.RANK),
        suffix="ForSequenceClassification",
        num_labels=labels,
    )
    tokens: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(file), dtype="float32", skip_tokenizer_init=True) as llm:
        outputs = llm.classify(tokens, use_tqdm=False)
    for output, prompt in zip(outputs, prompts(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        scores = logits.sigmoid() if labels == 1 else logits.softmax(0)
        np.testing.assert_allclose(output.outputs.probs, scores.numpy(), atol=5e-6)


def test_a_classifier_without_its_projection_is_refused(tmp_path: Path) -> None:
    write_encoder(
        "bert", tmp_path / "model", tmp_path / "m.gguf", suffix="ForSequenceClassification"
    )
    with pytest.raises(EngineStartError, match="a classifier without the projection before it"):
        LLM(str(tmp_path / "m.gguf"), skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", [7, -1, "mean", [1, 2]])
def test_an_unknown_pooling_is_named(kind: Any, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        adders = {str: writer.add_string, int: writer.add_int32, list: writer.add_array}
        adders[type(kind)]("bert.pooling_type", kind)

    write_encoder("bert", tmp_path / "model", tmp_path / "m.gguf", change)
    with pytest.raises(EngineStartError, match=r"pooling_type .+ is not known"):
        LLM(str(tmp_path / "m.gguf"), skip_tokenizer_init=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_its_vectors_are_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    """llama.cpp looks gates and GELU up in a table of float16."""
    _, _, file = written(case, tmp_path, lambda writer: writer.add_vocab_size(300))
    with context_of(file, embeddings=True) as (api, context, _):
        for prompt, ours in zip(prompts(), embedded(file), strict=True):
            batch = api.llama_batch_init(len(prompt), 0, 1)
            batch.n_tokens = len(prompt)
            for position, token in enumerate(prompt):
                batch.token[position], batch.pos[position] = token, position
                batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
                batch.logits[position] = 1
            assert api.llama_decode(context, batch) == 0
            values = api.llama_get_embeddings_seq(context, ctypes.c_int32(0))
            found = torch.from_numpy(np.ctypeslib.as_array(values, (len(ours),)).copy())
            np.testing.assert_allclose(unit(found), ours, atol=1e-3)
            api.llama_batch_free(batch)
