"""The texts, the choice of settings and the figures of tools/bench_embed.py; without an engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bench_embed
import click
import numpy as np
import pytest
from bench_embed import (
    NAMES,
    check_agreement,
    fastest,
    find_peers,
    least_cosine,
    parse_peers,
    summarize,
    tree_cpu_s,
)
from compare_peers import PEERS
from embed_texts import make_texts, sample_rows, single_token_words
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from shmllm.frontend.model_files import resolve_model

VOCABULARY = ["[UNK]", "[CLS]", "[SEP]", "the", "river", "bank", "of", "##ing", "Upper", "42", "é"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A tokenizer as BERT's, with two special tokens around each text."""
    found = Tokenizer(WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    found.normalizer = Lowercase()
    found.pre_tokenizer = Whitespace()
    found.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return found


def test_words_are_whole_tokens_of_letters(tokenizer: Tokenizer) -> None:
    assert single_token_words(tokenizer)[:2] == ["bank", "river"]
    assert set(single_token_words(tokenizer)) <= {"bank", "river", "the", "upper"}


def test_texts_have_the_lengths_asked_for_and_depend_on_the_seed_only(tokenizer: Tokenizer) -> None:
    texts, lengths = make_texts(tokenizer, 50, (5, 9), seed=3)
    assert [len(tokenizer.encode(text).ids) for text in texts] == lengths
    assert set(lengths) == {5, 6, 7, 8, 9}
    assert make_texts(tokenizer, 50, (5, 9), seed=3) == (texts, lengths)
    assert make_texts(tokenizer, 50, (5, 9), seed=4)[0] != texts


def test_texts_of_a_byte_level_vocabulary_have_the_lengths_asked_for() -> None:
    tokenizer = Tokenizer.from_file(str(Path(resolve_model("tiny")) / "tokenizer.json"))
    texts, lengths = make_texts(tokenizer, 20, (20, 200), seed=0)
    assert [len(tokenizer.encode(text).ids) for text in texts] == lengths


def test_a_vocabulary_without_words_is_refused() -> None:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "##ing": 1}, unk_token="[UNK]"))
    with pytest.raises(click.ClickException, match="no words of one token"):
        make_texts(tokenizer, 1, (5, 9), seed=0)


def test_a_sample_has_a_quarter_of_the_texts_in_blocks_of_neighbouring_lengths() -> None:
    lengths = np.random.default_rng(0).permutation(2048).tolist()
    found = [lengths[row] for row in sample_rows(lengths)]
    blocks = [range(begin, begin + 128) for begin in (128, 640, 1152, 1664)]
    assert found == [length for block in blocks for length in block]
    assert sorted(sample_rows([3, 1, 2])) == [0, 1, 2]


def test_the_least_cosine_is_that_of_the_worst_row() -> None:
    ours = np.array([[2, 0], [0, 3], [1, 1]], np.float32)
    theirs = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    assert least_cosine(ours, theirs) == pytest.approx(0.5**0.5)


@pytest.mark.parametrize(
    ("dtypes", "second", "agrees"),
    [
        (["float32", "float32"], [1, 0.01], True),
        (["float32", "float32"], [1, 0.02], False),
        (["float32", "bfloat16"], [1, 0.1], True),
        (["bfloat16", "float32"], [1, 0.2], False),
        (["bfloat16", "bfloat16"], [1, np.nan], False),
    ],
)
def test_vectors_have_to_agree_as_far_as_the_dtypes_let_them(
    dtypes: list[str], second: Sequence[float], agrees: bool
) -> None:
    vectors = {
        "shmllm": np.array([[1, 0]], np.float32),
        "openvino": np.array([second], np.float32),
    }
    by_name = dict(zip(vectors, dtypes, strict=True))
    if agrees:
        assert check_agreement(vectors, by_name)["openvino"] < 1
    else:
        with pytest.raises(click.ClickException, match="shmllm and openvino do not agree"):
            check_agreement(vectors, by_name)


def test_the_fastest_settings_are_kept() -> None:
    tried = [({"batch_size": 8}, 3.0), ({"batch_size": 16}, 2.0), ({"batch_size": 32}, 2.5)]
    assert fastest(tried) == {"batch_size": 16}


def test_figures_are_medians_and_ratios_those_of_rounds() -> None:
    found = summarize({"shmllm": [1.0, 2.0, 4.0], "openvino": [3.0, 2.0, 6.0]}, 12, 600)
    assert found["texts_per_s"] == {"shmllm": 6, "openvino": 4}
    assert found["tokens_per_s"] == {"shmllm": 300, "openvino": 200}
    assert found["best_texts_per_s"] == {"shmllm": 12, "openvino": 6}
    assert found["ratios"] == {"openvino": 1.5}
    assert summarize({"openvino": [1.0]}, 1, 1)["ratios"] == {}


def test_interpreters_are_read_and_every_peer_has_a_module() -> None:
    assert parse_peers(None, None, ()) == {"shmllm": sys.executable}
    assert parse_peers(None, None, ("sentence-transformers=a/b", "shmllm=c"))["shmllm"] == "c"
    assert all((PEERS / f"embed_{name}.py").is_file() for name in NAMES)
    for wrong in ("openvino", "openvino=", "vllm=x"):
        with pytest.raises(click.BadParameter, match=f"'{wrong}' is not NAME=PYTHON"):
            parse_peers(None, None, (wrong,))


def test_onnxruntime_is_left_out_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_embed, "missing", lambda peer, precision: None)
    pythons = dict.fromkeys(NAMES, sys.executable)
    assert [peer.name for peer in find_peers(pythons, "float32", 2)] == list(NAMES)
    assert "onnxruntime" not in [peer.name for peer in find_peers(pythons, "bfloat16", 2)]
    assert capsys.readouterr().err == "without onnxruntime: its CPU kernels have no bfloat16\n"


def test_the_cpu_time_of_a_process_grows() -> None:
    before = tree_cpu_s(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert tree_cpu_s(os.getpid()) > before
