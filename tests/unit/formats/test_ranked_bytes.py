"""Tokenizers from tekken.json, tiktoken.model and GLM-4's tokenizer.model, beside transformers and
beside the algorithm."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
from support.ranked_tokenizers import (
    CONTROLS,
    NUM_SPECIAL,
    RANKED,
    encoded,
    write_glm4,
    write_kimi,
    write_tekken,
)

from shmllm.errors import EngineStartError
from shmllm.frontend.text.tokenizer import Tokenizer

TEXTS = ["the thing, then", " théé 的 12\n\n  xthe", "[INST]the[/INST]", ""]


@pytest.fixture
def tekken(tmp_path):
    return write_tekken(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_tekken_has_the_tokens_of_transformers_behind_the_first_one(tekken, text):
    from transformers.integrations.mistral import convert_tekken_tokenizer

    theirs = convert_tekken_tokenizer(str(tekken / "tekken.json"))
    ours = Tokenizer.from_directory(tekken)
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [CONTROLS.index("<s>"), *expected]
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_the_special_tokens_of_tekken(tekken):
    ours = Tokenizer.from_directory(tekken)
    assert ours.special_tokens["bos_token"] == "<s>"
    assert ours.special_tokens["eos_token"] == "</s>"
    assert ours.special_ids == set(range(NUM_SPECIAL))
    assert ours.id_to_token(NUM_SPECIAL - 1) == f"<SPECIAL_{NUM_SPECIAL - 1}>"
    (tekken / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[INST]"}))
    assert Tokenizer.from_directory(tekken).special_tokens["pad_token"] == "[INST]"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.pop("special_tokens"), "has no special_tokens"),
        (lambda c: c.pop("config"), "KeyError: 'config'"),
        (lambda c: c["config"].update(pattern="("), "tekken.json"),
        (lambda c: c["vocab"][5].update(token_bytes=7), "TypeError"),
    ],
)
def test_a_malformed_tekken_file_is_an_error_with_its_name(tekken, change, reason):
    path = tekken / "tekken.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(EngineStartError, match=reason) as caught:
        Tokenizer.from_directory(tekken)
    assert str(path) in str(caught.value)


@pytest.fixture
def kimi(tmp_path):
    return write_kimi(tmp_path)


def joined(word):
    """The tokens of a word: of all neighbours those are joined that have the lowest rank."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [first + second for first, second in pairwise(parts)]
        best = min((RANKED.index(each) for each in pairs if each in RANKED), default=None)
        if best is None:
            break
        at = pairs.index(RANKED[best])
        parts[at : at + 2] = [pairs[at]]
    return [RANKED.index(part) for part in parts]


@pytest.mark.parametrize(
    "words",
    [["the", " thing", ",", " then"], ["thE", "ing"], ["的", "the", " éthing"], ["123", "4"]],
)
def test_kimi_joins_by_rank_within_its_words(kimi, words):
    ours = Tokenizer.from_directory(kimi)
    found = ours.encode("".join(words))
    assert found == [token for word in words for token in joined(word.encode())]
    assert ours.decode(found) == "".join(words)


def test_the_added_tokens_of_kimi(kimi):
    ours = Tokenizer.from_directory(kimi)
    first = len(RANKED)
    assert ours.encode("the[EOS]<|tool_call_begin|>") == [
        RANKED.index(b"the"),
        first + 1,
        first + 5,
    ]
    assert ours.id_to_token(first + 255) == f"<|reserved_token_{first + 255}|>"
    assert ours.decode([first + 1, first + 5]) == "<|tool_call_begin|>"
    assert ours.special_tokens == {"eos_token": "[EOS]"}


def test_a_tiktoken_file_of_another_class_is_left_to_transformers(kimi, monkeypatch):
    (kimi / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Other"}))
    monkeypatch.setitem(sys.modules, "transformers", object())
    with pytest.raises(EngineStartError, match="transformers cannot load"):
        Tokenizer.from_directory(kimi)


def test_ranks_with_a_gap_are_an_error(kimi):
    (kimi / "tiktoken.model").write_text(f"{encoded(b'a')} 0\n{encoded(b'b')} 2\n")
    with pytest.raises(EngineStartError, match="ranks are not 0, 1, 2"):
        Tokenizer.from_directory(kimi)


def test_glm4_begins_each_text_with_two_tokens(tmp_path):
    ours, first = Tokenizer.from_directory(write_glm4(tmp_path)), len(RANKED)
    words = ["the", " thing", "\n", "<|user|>", "the"]
    tokens = [t for word in words[:3] for t in joined(word.encode())]
    tokens += [first + 4, RANKED.index(b"the")]
    assert ours.encode("".join(words)) == [first + 2, first + 3, *tokens]
    assert ours.encode("".join(words), add_special_tokens=False) == tokens
    assert ours.decode(tokens) == "the thing\nthe"
    assert ours.special_tokens["eos_token"] == "<|endoftext|>"


def test_a_glm4_without_its_first_tokens_is_an_error(tmp_path):
    path = write_glm4(tmp_path) / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<sop>", "<eop>"))
    with pytest.raises(EngineStartError, match=r"tokenizer\.model: KeyError: '<sop>'"):
        Tokenizer.from_directory(tmp_path)
