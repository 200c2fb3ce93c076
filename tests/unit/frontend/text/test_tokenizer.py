"""Tokenizer: loading, encoding, decoding, errors and imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tokenizers
from support.encoder_tokenizers import library_tokenizer
from support.tokenizer_helpers import token_id_of, vocab_size_of

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import FastBackend, TransformersBackend


@pytest.fixture(scope="module")
def tokenizer(byte_level_model):
    return Tokenizer.from_directory(byte_level_model)


def test_encode_neither_truncates_nor_pads(tokenizer, samples):
    for sample in [*samples, "x", ""]:
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids) == sample
    assert tokenizer.encode_batch(samples) == [tokenizer.encode(sample) for sample in samples]
    assert tokenizer.encode_batch([]) == []


def test_special_tokens(tokenizer):
    end = token_id_of(tokenizer, "<|end|>")
    assert tokenizer._backend.special_ids == {end, token_id_of(tokenizer, "<|user|>")}
    assert tokenizer.special_tokens == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    ids = tokenizer.encode("fox<|end|>")
    assert ids[-1] == end
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "fox<|end|>"


def test_markers_of_the_vocabulary_stay_whole():
    content = json.loads(library_tokenizer("bert").to_str())
    vocabulary = content["model"]["vocab"]
    size = len(vocabulary)
    vocabulary |= {"[unused1]": size, "[Q] ": size + 1}
    tokenizer = Tokenizer(FastBackend(tokenizers.Tokenizer.from_str(json.dumps(content))))
    plain = tokenizer.encode("fox", add_special_tokens=False)
    for marker in ("[unused1] ", "[Q] "):
        assert len(tokenizer.encode(marker + "fox", add_special_tokens=False)) > len(plain) + 1
    tokenizer.keep_whole(["[unused1] ", "[Q] ", "[PAD] ", "unknown ", ""])
    assert tokenizer.encode("[unused1] fox", add_special_tokens=False) == [size, *plain]
    assert tokenizer.encode("[Q] fox", add_special_tokens=False) == [size + 1, *plain]
    assert {size, size + 1} <= tokenizer.special_ids
    assert "unknown" not in tokenizer.added_tokens


def test_ids_outside_the_vocabulary_have_no_token_and_no_text(tokenizer):
    assert tokenizer.id_to_token(vocab_size_of(tokenizer) - 1) == "plain"
    assert tokenizer.id_to_token(vocab_size_of(tokenizer)) is None
    assert tokenizer.decode([vocab_size_of(tokenizer) + 5]) == ""


def test_the_byte_table_agrees_with_decode(tokenizer, tokenizer_of):
    table = tokenizer.byte_table(skip_special_tokens=False)
    for token_id in range(vocab_size_of(tokenizer) + 3):
        expected = tokenizer.decode([token_id], skip_special_tokens=False)
        assert table[token_id].decode("utf-8", "replace") == expected
    skipping = tokenizer.byte_table(skip_special_tokens=True)
    assert skipping[token_id_of(tokenizer, "<|end|>")] == b""
    assert tokenizer_of("metaspace").byte_table(skip_special_tokens=True) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\ud800c", r"lone surrogate '\\ud800' at character 2"),
        (7, "must be a str, got int"),
        (None, "must be a str, got NoneType"),
    ],
)
def test_text_that_cannot_be_encoded_is_an_error(tokenizer, text, message):
    with pytest.raises(RequestError, match=message):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=f"text 1 .*{message}"):
        tokenizer.encode_batch(["fine", text])


def test_special_tokens_map_and_named_extras(tmp_path, byte_level_model):
    (tmp_path / "tokenizer.json").write_bytes((byte_level_model / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|user|>", "pad_token": "<|end|>"})
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "extra_special_tokens": {"image_token": "plain"}})
    )
    assert Tokenizer.from_directory(tmp_path).special_tokens == {
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "image_token": "plain",
    }


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"SIZE": {"content": "<new>"}}}),
        ("added_tokens.json", {"<new>": "SIZE"}),
    ],
)
def test_tokens_that_only_a_file_beside_it_has(file, content, tmp_path, byte_level_model):
    before = Tokenizer.from_directory(byte_level_model)
    size = vocab_size_of(before)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level_model / name).read_bytes())
    text = json.dumps(content)
    place = '"SIZE"' if file == "added_tokens.json" else "SIZE"
    (tmp_path / file).write_text(text.replace(place, str(size)))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a<new>") == [*before.encode("a"), size]
    assert tokenizer.decode([size]) == "<new>"
    (tmp_path / file).write_text(text.replace(place, str(size + 1)))
    assert Tokenizer.from_directory(tmp_path).encode("a<new>") == before.encode("a<new>")


MERGES = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
PANICS = json.dumps({"model": {"type": "BPE", **MERGES, "continuing_subword_prefix": "######"}})
"""The library looks for the part of a token behind a prefix that is longer."""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no tokenizer in .*tokenizer\.json, tekken\.json, .*tokenizer\.model"),
        ({"tokenizer.json": "{"}, r"cannot read .*tokenizer\.json"),
        ({"tokenizer.json": PANICS}, r"cannot read .*tokenizer\.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "expected a JSON object"),
    ],
)
def test_load_errors(tmp_path, byte_level_model, files, message):
    for name, content in files.items():
        content = content or (byte_level_model / name).read_text()
        (tmp_path / name).write_text(content)
    with pytest.raises(EngineStartError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


class FakeTransformers:
    """A fake `transformers` module, which is also the AutoTokenizer and the tokenizer itself."""

    special_tokens_map = {"eos_token": "</s>"}  # noqa: RUF012
    all_special_ids = [2]  # noqa: RUF012

    def __init__(self):
        self.AutoTokenizer = self

    def from_pretrained(self, path, **kwargs):
        assert kwargs["trust_remote_code"] is False  # None asks on the terminal
        return self

    def get_vocab(self):
        return {"a": 0, "b": 1, "</s>": 2}

    def get_added_vocab(self):
        return {"</s>": 2}

    def encode(self, text, add_special_tokens):
        return ["ab".index(letter) for letter in text] + [2] * add_special_tokens

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        tokens = [self.convert_ids_to_tokens(token_id) for token_id in ids]
        return "".join(t for t in tokens if not (skip_special_tokens and t == "</s>"))

    def convert_ids_to_tokens(self, token_id):
        return ["a", "b", "</s>"][token_id]


BYT5 = json.dumps({"tokenizer_class": "ByT5Tokenizer"})
"""Its vocabulary is in no file."""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", ""),
        ("spiece.model", ""),
        ("sentencepiece.bpe.model", ""),
        ("spm.model", ""),
        ("source.spm", ""),
        ("tokenizer_config.json", BYT5),
    ],
)
def test_a_directory_without_tokenizer_json_falls_back_to_transformers(
    name, content, tmp_path, monkeypatch
):
    (tmp_path / name).write_text(content)
    monkeypatch.setitem(sys.modules, "transformers", FakeTransformers())
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert isinstance(tokenizer._backend, TransformersBackend)
    assert tokenizer.encode_batch(["ab", "b"]) == [[0, 1, 2], [1, 2]]
    assert tokenizer.decode([0, 9, 2, 1]) == "ab"
    assert tokenizer.decode([0, 2], skip_special_tokens=False) == "a</s>"
    assert (tokenizer.id_to_token(1), tokenizer.id_to_token(9)) == ("b", None)


@pytest.mark.parametrize("text", ["a\ud800", 5])
def test_what_is_no_text_does_not_reach_a_tokenizer_of_transformers(text, tmp_path, monkeypatch):
    (tmp_path / "vocab.json").touch()
    monkeypatch.setitem(sys.modules, "transformers", FakeTransformers())
    tokenizer = Tokenizer.from_directory(tmp_path)
    tokenizer._backend._tokenizer = None
    message = "must be a str" if text == 5 else "lone surrogate"
    with pytest.raises(RequestError, match=message):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=message):
        tokenizer.encode_batch([text])
    with pytest.raises(RequestError, match=message):
        tokenizer.encode_pairs([("a", text)])


def test_the_fallback_unwraps_a_fast_tokenizer(tmp_path, monkeypatch, tokenizer_of):
    (tmp_path / "vocab.json").write_text("{}")
    fake = FakeTransformers()
    fake.backend_tokenizer = tokenizer_of("byte_level")._backend._tokenizer
    monkeypatch.setitem(sys.modules, "transformers", fake)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert isinstance(tokenizer._backend, FastBackend)
    assert tokenizer.special_tokens == {"eos_token": "</s>"}


def test_a_fallback_that_fails_is_an_error_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "vocab.json").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", object())
    with pytest.raises(EngineStartError, match="transformers cannot load") as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_fallback_names_the_packages_that_it_lacks(tmp_path, monkeypatch):
    """transformers asks for `tiktoken` in place of `sentencepiece`."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setitem(sys.modules, "transformers", object())
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    needed = r"either: tokenizer\.model needs `pip install sentencepiece protobuf`$"
    with pytest.raises(EngineStartError, match=needed):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")  # that of Llama 3 is tiktoken's
    with pytest.raises(EngineStartError, match="cannot load its tokenizer either \\(Attr"):
        Tokenizer.from_directory(tmp_path)


def run_python(code, *arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_imports_neither_torch_nor_transformers(byte_level_model):
    code = """
import sys
from pathlib import Path
from shmllm.frontend.text.detokenizer import IncrementalDetokenizer, OutputText
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.model_files import generation_defaults, resolve_model

directory = resolve_model(sys.argv[1])
generation_defaults(directory)
tokenizer = Tokenizer.from_directory(directory)
ids = tokenizer.encode("the fox")
output = OutputText(IncrementalDetokenizer(tokenizer, ids), ["fox"])
output.append(ids)
assert output.text == "the ", output.text
assert "jinja2" not in sys.modules
assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "user:hi\\n"
print([name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules])
"""
    assert run_python(code, byte_level_model).stdout == "[]\n"


@pytest.mark.parametrize("setting", [None, "true", "false"])
def test_forked_children_are_silent_and_encode(byte_level_model, setting):
    code = """
import os, sys
from pathlib import Path
from shmllm.frontend.text.tokenizer import Tokenizer

tokenizer = Tokenizer.from_directory(Path(sys.argv[1]))
tokenizer.encode_batch(["the fox"] * 64)
setting = os.environ["TOKENIZERS_PARALLELISM"]
pid = os.fork()
if pid == 0:
    if os.environ["TOKENIZERS_PARALLELISM"] == "false":
        tokenizer.encode_batch(["the fox"] * 64)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(setting)
"""
    environment = {} if setting is None else {"TOKENIZERS_PARALLELISM": setting}
    result = run_python(code, byte_level_model, **environment)
    assert (result.stdout, result.stderr) == (f"{setting or 'true'}\n", "")
