"""Directories that sentence-transformers writes are read as it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.client_helpers import needs
from support.encoder_tokenizers import save_bert_tokenizer

from shmllm.errors import EngineStartError
from shmllm.models.sentence_files import SentenceFiles, read_sentence_files

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    needs("sentence_transformers", how="pip install sentence-transformers"),
]

WIDTH = 32


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random encoder with one class."""
    from transformers import BertConfig, BertForSequenceClassification

    path = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=200,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
        max_position_embeddings=48,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(path)
    save_bert_tokenizer(path)
    return path


def read(directory: Path) -> SentenceFiles:
    found = read_sentence_files(directory)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mode", "name"), [("cls", "CLS"), ("mean", "MEAN"), ("lasttoken", "LAST")]
)
def test_sentence_embeddings(tmp_path: Path, bert: Path, mode: Any, name: str) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    chain = [
        modules.Transformer(str(bert), max_seq_length=20),
        modules.Pooling(WIDTH, mode, include_prompt=False),
        modules.Dense(WIDTH, 16, activation_function=torch.nn.Tanh()),
        modules.Dense(16, 8, bias=False, activation_function=torch.nn.GELU()),
        modules.Normalize(),
    ]
    prompts = {"query": "a b: ", "document": ""}
    SentenceTransformer(modules=chain, prompts=prompts, default_prompt_name="query").save(
        str(tmp_path)
    )
    loaded, found = SentenceTransformer(str(tmp_path)), read(tmp_path)
    assert (found.task, found.pooling, found.include_prompt) == ("embed", name, False)
    assert (found.max_seq_length, found.normalize) == (loaded.max_seq_length, True)
    assert (found.prompts, found.default_prompt) == (loaded.prompts, loaded.default_prompt_name)
    assert found.similarity == loaded.similarity_fn_name
    assert [each.out_features for each in found.dense] == [16, 8]
    for each, module in zip(found.dense, list(loaded)[2:4], strict=True):
        assert (each.in_features, each.bias) == (module.in_features, module.bias)
        assert each.activation == type(module.activation_function).__name__.lower()
        assert each.path.is_file()


def test_pickled_weights_and_several_poolings_are_refused(tmp_path: Path, bert: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(str(bert))
    chain = [transformer, modules.Pooling(WIDTH), modules.Dense(WIDTH, 8)]
    SentenceTransformer(modules=chain).save(str(tmp_path / "bin"), safe_serialization=False)
    with pytest.raises(EngineStartError, match="pytorch_model"):
        read_sentence_files(tmp_path / "bin")
    chain = [transformer, modules.Pooling(WIDTH, ("cls", "mean"))]
    SentenceTransformer(modules=chain).save(str(tmp_path / "two"))
    with pytest.raises(EngineStartError, match=r"'cls\+mean'"):
        read_sentence_files(tmp_path / "two")


@pytest.mark.parametrize(("kind", "name"), [("Identity", "none"), ("Sigmoid", "sigmoid")])
def test_cross_encoders(tmp_path: Path, bert: Path, kind: str, name: str) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(bert), activation_fn=getattr(torch.nn, kind)()).save(str(tmp_path))
    found = read(tmp_path)
    assert (found.task, found.activation) == ("classify", name)
    assert found.max_seq_length == CrossEncoder(str(tmp_path)).max_seq_length


def test_late_interactions(tmp_path: Path, bert: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    MultiVectorEncoder(str(bert)).save(str(tmp_path))
    found = read(tmp_path)
    assert (found.task, found.pooling, found.normalize) == ("token_embed", None, True)
    assert [(each.in_features, each.activation) for each in found.dense] == [(WIDTH, "none")]
