"""Vectors and scores equal those of sentence-transformers, on random models of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.client_helpers import needs
from support.encoder_tokenizers import CORPUS, transformers_tokenizer
from support.pooling_models import make_pooling_model

from shmllm import LLM

pytestmark = [
    pytest.mark.clients,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks"),
    needs("sentence_transformers", how="pip install sentence-transformers"),
]

TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**25}
TEXTS = [*CORPUS, "fox", " ".join(CORPUS[:2]), "Paris and the lazy dog"]
TOKENIZERS = {
    "bert": "bert",
    "distilbert": "bert",
    "modernbert": "bert",
    "xlm_roberta": "roberta",
    "t5_encoder": "roberta",
    "electra": "bert",
    "eurobert": "llama",
    "mpnet": "roberta",
    "nomic_bert": "bert",
    "gte": "roberta",
    "jina_embeddings_v3": "roberta",
    "gemma3": "llama",
    "qwen3": "qwen",
}
PADS = {"bert": 0, "roberta": 1, "llama": 1, "qwen": 0}


def make(kind: str, suffix: str, directory: Path, **config: Any) -> Path:
    """A random model with the files of its tokenizer."""
    tokenizer = TOKENIZERS[kind]
    sizes = {"vocab_size": 320, "pad_token_id": PADS[tokenizer], "max_position_embeddings": 130}
    make_pooling_model(kind, suffix, directory, **(sizes | config))
    options = {"llama": {"pad_token": "</s>"}, "qwen": {"pad_token": "<|endoftext|>"}}
    own = transformers_tokenizer(tokenizer, model_max_length=128, **options.get(tokenizer, {}))
    own.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_embeddings(kind: str, mode: Any, tmp_path: Path) -> None:
    """With two projections, a norm and a prompt."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    source, saved = tmp_path / "source", tmp_path / "saved"
    torch.manual_seed(5)
    chain = [
        modules.Transformer(str(make(kind, "Model", source)), max_seq_length=24),
        modules.Pooling(64, mode),
        modules.Dense(64, 96, bias=False, activation_function=torch.nn.Identity()),
        modules.Dense(96, 40, activation_function=torch.nn.Tanh()),
        modules.Normalize(),
    ]
    prompts = {"query": "the fox: "}
    reference = SentenceTransformer(modules=chain, prompts=prompts, device="cpu")
    reference.save_pretrained(str(saved))
    wanted = reference.encode(TEXTS)
    with LLM(str(saved), **OPTIONS) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=-1)
        ours = np.array([output.outputs.embedding for output in outputs])
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    "kind", [kind for kind in TOKENIZERS if kind not in ("gemma3", "qwen3", "t5_encoder")]
)
def test_scores_of_pairs(kind: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    source, saved = tmp_path / "source", tmp_path / "saved"
    make(kind, "ForSequenceClassification", source, num_labels=1)
    reference = CrossEncoder(str(source), device="cpu")
    reference.save_pretrained(str(saved))
    wanted = reference.predict([(TEXTS[0], text) for text in TEXTS])
    with LLM(str(saved), **OPTIONS) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        ours = np.array([output.outputs.score for output in outputs])
    assert np.abs(ours - wanted).max() < TOLERANCE


def test_scores_by_the_logits_of_tokens(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules.logit_score import LogitScore

    source, saved = tmp_path / "source", tmp_path / "saved"
    decoder = Transformer(
        str(make("qwen3", "ForCausalLM", source)), transformer_task="text-generation"
    )
    reference = CrossEncoder(modules=[decoder, LogitScore(9, 30)], device="cpu")
    reference.save_pretrained(str(saved))
    wanted = reference.predict([(TEXTS[0], text) for text in TEXTS])
    with LLM(str(saved), **OPTIONS) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        ours = np.array([output.outputs.score for output in outputs])
    assert np.abs(ours - wanted).max() < TOLERANCE
