"""Embeddings, scores and late interaction equal those of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.client_helpers import needs
from support.encoder_tokenizers import transformers_tokenizer

from shmllm import LLM

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks"),
    needs("sentence_transformers", how="pip install sentence-transformers"),
]

TOLERANCE = 1e-5
WIDTH = 32
TEXTS = [
    "Paris is the largest city of France.",
    "The quick brown fox jumps over the lazy dog, and then it does it again, and then again.",
    "a dog",
]
QUERIES = ["what is the capital of France?", "a fox", "a lazy dog"]
PROMPTS = {"query": "find : ", "document": ""}
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


def make_bert(path: Path, num_labels: int = 1) -> Path:
    """Write a random encoder."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=200,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        num_labels=num_labels,
    )
    model = BertForSequenceClassification(config)
    for weight in model.parameters():
        weight.data *= 3.0 if weight.ndim > 1 else 1.0
    model.save_pretrained(path)
    transformers_tokenizer("bert", model_input_names=INPUTS).save_pretrained(path)
    return path


def start(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), multiprocess=False, num_threads=1, **options)


def worst(ours: Any, reference: Any) -> float:
    return float(np.abs(np.asarray(ours) - np.asarray(reference)).max())


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize(("dense", "normalize"), [(0, True), (0, False), (16, True)])
def test_embeddings(
    tmp_path: Path, mode: Any, dense: int, normalize: bool, include_prompt: bool
) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    if mode == "cls" and not include_prompt:
        pytest.skip("a text without its prompt has no first token here")
    chain = [
        modules.Transformer(str(make_bert(tmp_path / "bert"))),
        modules.Pooling(WIDTH, mode, include_prompt=include_prompt),
        *([modules.Dense(WIDTH, dense, activation_function=torch.nn.Tanh())] if dense else []),
        *([modules.Normalize()] if normalize else []),
    ]
    model = SentenceTransformer(modules=chain, prompts=PROMPTS, default_prompt_name="query")
    model.save(str(tmp_path / "model"))
    with start(tmp_path / "model") as llm:
        for name in PROMPTS:
            outputs = llm.embed(TEXTS, prompt_name=name, use_tqdm=False)
            wanted = model.encode(TEXTS, prompt_name=name)
            assert worst([each.outputs.embedding for each in outputs], wanted) < TOLERANCE
        outputs = llm.embed(TEXTS, use_tqdm=False)
        wanted = model.encode(TEXTS, prompt="")
        assert worst([each.outputs.embedding for each in outputs], wanted) < TOLERANCE
        scores = llm.score(QUERIES, TEXTS, use_tqdm=False)
        pairs = model.similarity_pairwise(
            model.encode(QUERIES, prompt=""), model.encode(TEXTS, prompt="")
        )
        assert worst([each.outputs.score for each in scores], pairs) < TOLERANCE


def test_cross_encoders(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(make_bert(tmp_path / "bert")))
    model.save(str(tmp_path / "model"))
    with start(tmp_path / "model") as llm:
        outputs = llm.score(QUERIES, TEXTS, use_tqdm=False)
        wanted = model.predict([*zip(QUERIES, TEXTS, strict=True)])
        assert worst([each.outputs.score for each in outputs], wanted) < TOLERANCE
        long = TEXTS[1] * 3
        output = llm.score(QUERIES[0], long, truncate_prompt_tokens=-1, use_tqdm=False)[0]
        wanted = model.predict([(QUERIES[0], long)])
        assert worst([output.outputs.score], wanted) < TOLERANCE


def test_late_interaction(tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(make_bert(tmp_path / "bert")))
    model.save(str(tmp_path / "model"))
    with start(tmp_path / "model") as llm:
        assert llm.facts.pooling.task == "token_embed"
        outputs = llm.encode(TEXTS, use_tqdm=False)
        wanted = model.encode(TEXTS, prompt="")
        for output, rows in zip(outputs, wanted, strict=True):
            assert worst(output.outputs.array, rows) < TOLERANCE
