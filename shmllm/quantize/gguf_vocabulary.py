"""The metadata of a GGUF file that describe a tokenizer, and the check that it splits texts alike.

Two kinds of tokenizer.json can be written: byte-level BPE, and SentencePiece's BPE with bytes. The
check makes a tokenizer of the metadata, as a reader of the file would, and compares both on texts.
This module must not know the model's shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from shmllm.errors import EngineStartError, QuantizeError
from shmllm.formats.gguf import GgufHeader
from shmllm.formats.pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from shmllm.formats.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from shmllm.formats.tokenizer_files import FAST_FILE
from shmllm.frontend.gguf.tokenizer import make_tokenizer
from shmllm.frontend.gguf.vocabulary import NAMED_IDS
from shmllm.frontend.text.chat_template import load_templates
from shmllm.frontend.text.tokenizer_backend import load_backend
from shmllm.models.fields import read_json_object

Json = dict[str, Any]

_PREFIX = "tokenizer.ggml"
_NUM_ADDED = 16
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  I'll say it's 'YOU'VE' DON'T we're; 12345 1,234.5 x86_64",
    "\n\n\tdef f(x):\n        return x+1\r\n",
    "camelCaseWords HTTPServer naïve café e\u0301a\u0308 Ünïcode ΑΒΓ абв",
    "你好\uff0c世界\u3002こんにちは 한국어",
    "emoji 🙂👍🏽 ½ ² Ⅷ ٣٤ (a)[b]{c}<d>!!! ... --- === && || ::  `~@#$%^*",
    "a  b   c    d \n \n  e\u00a0f\u3000g",
    " leading, and trailing ",
)


def vocabulary(directory: Path, num_rows: int) -> Json:
    """The metadata of a model's tokenizer and chat templates.

    Args:
        directory: the model's directory.
        num_rows: the number of rows of the embedding table: a file has a token for each.

    Raises:
        QuantizeError: the tokenizer is of a kind that a file cannot have.
    """
    path = directory / FAST_FILE
    if not path.is_file():
        raise QuantizeError(f"no {FAST_FILE} in {directory}, which a GGUF file's tokenizer needs")
    content = read_json_object(path)
    model = content.get("model", {})
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise QuantizeError(
            f"{path}: a tokenizer of type {model.get('type')!r} cannot be written to a GGUF file; "
            "supported: BPE"
        )
    tokens, kinds = _tokens(path, content, num_rows)
    values: Json = {"tokens": tokens, "token_type": kinds}
    values |= _special_tokens(directory, tokens)
    values |= _templates(directory)
    pairs = [each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"]]
    if model.get("byte_fallback"):
        found = _as_sentence_piece(directory, values, _scores(tokens, pairs))
    else:
        found = _as_byte_level(directory, content, values, [" ".join(pair) for pair in pairs])
    return _prefixed(found)


def _prefixed(values: Json) -> Json:
    known = ((key if "." in key else f"{_PREFIX}.{key}", value) for key, value in values.items())
    return {key: value for key, value in known if value is not None}


def _tokens(path: Path, content: Json, num_rows: int) -> tuple[list[str], list[int]]:
    """The texts of all tokens by id, and their types."""
    model = content["model"]
    by_id = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(by_id, NORMAL)
    if model.get("byte_fallback"):
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
        types |= {number: BYTE for number, text in by_id.items() if text in bytes_}
    for added in content.get("added_tokens") or []:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is not None:
        types[unknown] = UNKNOWN
    largest = max(by_id, default=-1)
    if largest >= num_rows:
        raise QuantizeError(
            f"{path} has token {largest:,}, and the embedding table has only {num_rows:,} rows"
        )
    rows = range(num_rows)
    tokens = [by_id.get(number, f"[PAD{number}]") for number in rows]
    return tokens, [types.get(number, UNUSED) for number in rows]


def _special_tokens(directory: Path, tokens: list[str]) -> Json:
    """The ids of the special tokens, and whether texts begin and end with some."""
    backend, names = load_backend(directory)
    ids = {text: number for number, text in enumerate(tokens)}
    values: Json = {
        f"{target}_token_id": ids[names[name]]
        for name, target in NAMED_IDS.items()
        if names.get(name) in ids
    }
    around = backend.encode("a", True)
    bare = backend.encode("a", False)
    values["add_bos_token"] = len(around) > len(bare) and around[0] == values.get("bos_token_id")
    values["add_eos_token"] = len(around) > len(bare) and around[-1] == values.get("eos_token_id")
    return values


def with_ends(values: Json, end_ids: tuple[int, ...]) -> Json:
    """The metadata with the tokens that end a text: llama.cpp has names for three.

    Args:
        values: the tokenizer's metadata.
        end_ids: the model's tokens.
    """
    if not end_ids:
        return values
    eos = values.get(f"{_PREFIX}.eos_token_id")
    first = eos if eos in end_ids else end_ids[0]
    others = [each for each in end_ids if each != first]
    found = dict(zip(("eos", "eot", "eom"), [first, *others], strict=False))
    return values | {f"{_PREFIX}.{name}_token_id": number for name, number in found.items()}


def _templates(directory: Path) -> Json:
    key = "tokenizer.chat_template"
    return {
        (key if name == "default" else f"{key}.{name}"): text
        for name, text in load_templates(directory).items()
    }


def _as_byte_level(directory: Path, content: Json, values: Json, merges: list[str]) -> Json:
    """The metadata of byte-level BPE, under the name of its way to cut words."""
    name = _pre_tokenizer_name(content)
    if name is None:
        raise QuantizeError(
            f"{directory / FAST_FILE} cuts texts into words in a way that has no name in llama.cpp "
            f"which shmllm knows; known: {', '.join(PRE_TOKENIZERS)}"
        )
    found = {"model": "gpt2", "pre": name, **values, "merges": merges}
    problem = _first_problem(directory, found)
    if problem:
        raise QuantizeError(problem)
    return found


def _pre_tokenizer_name(content: Json) -> str | None:
    takes_whole_words = bool(content["model"].get("ignore_merges"))
    wanted = list(_words(content.get("normalizer"), content.get("pre_tokenizer")))
    for name, each in PRE_TOKENIZERS.items():
        if each.takes_whole_words == takes_whole_words and wanted == list(_words_of(each)):
            return name
    return None


def _words_of(each: PreTokenizer) -> Iterator[list[str]]:
    form = each.normalizer
    return _words({"type": form} if form else None, each.as_json())


def _words(normalizer: Json | None, pre_tokenizer: Json | None) -> Iterator[list[str]]:
    """The words of each text, as a tokenizer with these parts cuts it."""
    bare: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    made = tokenizers.Tokenizer.from_str(json.dumps(bare))
    for text in _TEXTS:
        normal = text if made.normalizer is None else made.normalizer.normalize_str(text)
        words = [(normal, None)]
        if made.pre_tokenizer is not None:
            words = made.pre_tokenizer.pre_tokenize_str(normal)
        yield [word for word, _ in words]


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores that order the merges: SentencePiece joins the two symbols whose token has the highest
    one. Tokens that no merge makes come last."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _as_sentence_piece(directory: Path, values: Json, scores: list[float]) -> Json:
    """The metadata of SentencePiece's BPE; tried with and without a space before texts."""
    problem = ""
    for adds_space in (True, False):
        found = {"model": "llama", **values, "scores": scores, "add_space_prefix": adds_space}
        problem = _first_problem(directory, found)
        if not problem:
            return found
    raise QuantizeError(problem)


def _first_problem(directory: Path, values: Json) -> str:
    """In which text a reader of the metadata finds other tokens; "" if there is none."""
    backend, _ = load_backend(directory)
    header = GgufHeader(Path("GGUF"), _prefixed(values), {})
    try:
        content, _ = make_tokenizer(header)
    except EngineStartError as error:
        return f"no GGUF file can have the tokenizer of {directory}: {error}"
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in (*_TEXTS, *_texts_with_added_tokens(values)):
        for adds in (True, False):
            expected = backend.encode(text, adds)
            if made.encode(text, add_special_tokens=adds).ids != expected:
                return (
                    f"no GGUF file can have the tokenizer of {directory}: {text[:40]!r} would get "
                    "other tokens"
                )
    return ""


def _texts_with_added_tokens(values: Mapping[str, Any]) -> list[str]:
    pairs = zip(values["tokens"], values["token_type"], strict=True)
    added = [token for token, kind in pairs if kind in (CONTROL, USER_DEFINED)]
    return [f"x{token}y" for token in (*added[:_NUM_ADDED], *added[-_NUM_ADDED:])]
