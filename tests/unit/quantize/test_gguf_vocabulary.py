"""Tokenizers in GGUF metadata: named if llama.cpp has a name for them, refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.quantize_helpers import BYTE_LEVEL, change_tokenizer

from shmllm.errors import QuantizeError
from shmllm.formats.pre_tokenizers import PRE_TOKENIZERS
from shmllm.frontend.model_files import resolve_model
from shmllm.quantize.gguf_vocabulary import vocabulary, with_ends

DIGITS = {"type": "Digits", "individual_digits": True}
NFC = {"type": "NFC"}
ROWS = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model("tiny") / name).read_bytes())
    change_tokenizer(tmp_path, pre_tokenizer=BYTE_LEVEL)
    return tmp_path


def test_a_byte_level_tokenizer_gets_its_name_tokens_and_template(directory: Path) -> None:
    found = vocabulary(directory, ROWS + 2)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert found["tokenizer.ggml.tokens"][:1] == ["<|endoftext|>"]
    assert found["tokenizer.ggml.tokens"][-1] == "[PAD4097]"
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert found["tokenizer.ggml.token_type"][-2:] == [5, 5]
    assert "messages" in found["tokenizer.chat_template"]
    assert not found["tokenizer.ggml.add_bos_token"]


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}}, "smollm"),
        ({"pre_tokenizer": PRE_TOKENIZERS["qwen2"].as_json(), "normalizer": NFC}, "qwen2"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]},
          "normalizer": NFC}, "command-r"),
        ({"pre_tokenizer": BYTE_LEVEL, "normalizer": NFC}, "olmo"),
        ({"pre_tokenizer": PRE_TOKENIZERS["glm4"].as_json()}, "dbrx"),
        ({"pre_tokenizer": PRE_TOKENIZERS["gpt-4o"].as_json()}, "gpt-4o"),
        ({"pre_tokenizer": PRE_TOKENIZERS["falcon"].as_json()}, "falcon"),
    ],
)  # fmt: skip
def test_the_way_to_cut_words_is_recognized(
    parts: dict[str, Any], name: str, directory: Path
) -> None:
    change_tokenizer(directory, **parts)
    assert vocabulary(directory, ROWS)["tokenizer.ggml.pre"] == name


def test_a_way_without_a_name_is_refused(directory: Path) -> None:
    change_tokenizer(directory, pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True})
    with pytest.raises(QuantizeError, match=r"no name in llama\.cpp"):
        vocabulary(directory, ROWS)


def test_another_type_of_tokenizer_is_refused(directory: Path) -> None:
    change_tokenizer(directory, model={"type": "WordPiece", "vocab": {"a": 0}})
    with pytest.raises(QuantizeError, match="type 'WordPiece' cannot be written"):
        vocabulary(directory, ROWS)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"no tokenizer\.json"):
        vocabulary(tmp_path, ROWS)


def test_another_post_processor_than_bos_and_eos_is_refused(directory: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    made.save(str(directory / "tokenizer.json"))
    with pytest.raises(QuantizeError, match="would get other tokens"):
        vocabulary(directory, ROWS)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_merges_become_scores(prefix: bool, tmp_path: Path) -> None:
    space = "\u2581"
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), (space, "t"), (f"{space}t", "he"), ("o", "v")]
    made = {"".join(pair): None for pair in merges}
    letters = dict.fromkeys(f"{space}helotvrbwnfxjumpsd")
    texts = ["<unk>", "<s>", "</s>", *bytes_, *made, *letters]
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": space}
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": space})
    model = tokenizers.models.BPE(
        {text: number for number, text in enumerate(texts)}, merges,
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    change_tokenizer(tmp_path, normalizer={"type": "Sequence", "normalizers": normalizers})
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    found = vocabulary(tmp_path, len(texts))
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is prefix
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    scores = dict(zip(texts, found["tokenizer.ggml.scores"], strict=True))
    assert [scores["".join(pair)] for pair in merges] == [0, -1, -2, -3, -4, -5]


def test_up_to_three_ends_have_names() -> None:
    values = {"tokenizer.ggml.eos_token_id": 5}
    found = with_ends(values, (7, 5, 9))
    assert found == {
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 9,
    }
    assert with_ends(values, ()) == values
