"""Small tokenizers, also with tokens that stand for images, random images, and an LLM with a fake
engine."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image
from support.fakes import FakeEngineClient
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from shmllm import LLM, AsyncLLM
from shmllm.frontend import front_end
from shmllm.frontend.model_files import bundled_model
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import FastBackend

SAMPLES = [
    "The quick brown fox jumps over the lazy dog, and then it does it again.",
    "def walk(path):\n    for name in sorted(path):\n        yield name, len(name)\n",
    "中文和日本語のテキスト、한국어 문장도 있습니다。",
    "Emoji: 😀😃👩‍👩‍👧‍👦🇩🇪, combining: e\u0301a\u0308 Z\u0361, accents: héßø",
    "مرحبا بالعالم नमस्ते दुनिया",
]
SPECIAL = ["<|end|>", "<|user|>"]


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    tokenizer.add_tokens(["héllo", "中 added", "plain"])
    return tokenizer


def _train_metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


def _train_byte_fallback() -> tokenizers.Tokenizer:
    """A vocabulary like Llama 2's: U+2581 for spaces, byte tokens for unknown characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES[:2], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    content["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _train_word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


TRAINERS = {
    "byte_level": train_byte_level,
    "metaspace": _train_metaspace,
    "byte_fallback": _train_byte_fallback,
    "word_piece": _train_word_piece,
}


@pytest.fixture(scope="session")
def tokenizer_of():
    """A function that returns the Tokenizer of a kind: byte_level, metaspace, byte_fallback or
    word_piece."""
    trained = {}

    def get(kind):
        if kind not in trained:
            trained[kind] = Tokenizer(FastBackend(TRAINERS[kind]()))
        return trained[kind]

    return get


@pytest.fixture(scope="session")
def samples():
    return SAMPLES


@pytest.fixture(scope="session")
def byte_level_model(tmp_path_factory):
    """A directory with the files of a byte-level tokenizer that has truncation and padding."""
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer = train_byte_level()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|user|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    # Enough for a front end to start an engine, which the tests replace.
    shutil.copy(bundled_model("tiny") / "config.json", directory)
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture
def make_llm(monkeypatch, byte_level_model):
    """A function that returns an LLM and the FakeEngineClient that it uses."""

    def make(steps_per_poll=1, options=None, **changes):
        engine = FakeEngineClient(steps_per_poll, **changes)
        monkeypatch.setattr(front_end, "start_engine", lambda *_: engine)
        options = {"generation_config": "shmllm"} | (options or {})
        return LLM(str(byte_level_model), **options), engine

    return make


@pytest.fixture
def make_async_llm(monkeypatch, byte_level_model):
    """A function that returns an AsyncLLM and the FakeEngineClient that it uses."""
    made = []

    def make(steps_per_poll=1):
        engine = FakeEngineClient(steps_per_poll)
        monkeypatch.setattr(front_end, "start_engine", lambda *_: engine)
        made.append(AsyncLLM(str(byte_level_model), generation_config="shmllm"))
        return made[-1], engine

    yield make
    for llm in made:
        llm.shutdown()
    assert "shmllm" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def random_image() -> Callable[..., Image.Image]:
    """Makes an RGB image of random pixels, the same for the same sides."""

    def make(width: int, height: int, seed: int = 0) -> Image.Image:
        random = np.random.default_rng([seed, width, height])
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return make


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of transformers with one token a byte, and tokens of several newlines."""
    from transformers import PreTrainedTokenizerFast

    def make(special: list[str], newlines: int = 0, **names: str) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {character: index for index, character in enumerate(alphabet)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        runs = [AddedToken("\n" * n, normalized=False) for n in range(1, newlines + 1)]
        tokenizer.add_tokens(runs)
        tokenizer.add_special_tokens(special)
        named = {"extra_special_tokens": names} if names else {}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)

    return make
