"""Tokenizers in the files of `tiktoken`, which have tokens as bytes, in the order of their ranks:
Mistral's tekken.json, the tiktoken.model of Kimi and Moonlight, and GLM-4's first tokenizer.model.

BPE joins the two neighbours whose joined token has the lowest rank, so the merges are the ways to
cut each token in two, in the order of the tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from shmllm.errors import EngineStartError
from shmllm.formats.byte_level import CHARACTERS
from shmllm.formats.pre_tokenizers import PRE_TOKENIZERS
from shmllm.formats.text_files import one_line, read_json_object

TEKKEN, TIKTOKEN, _GLM4 = "tekken.json", "tiktoken.model", "tokenizer.model"
_OF_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OF_KIMI, _OF_GLM4 = "TikTokenTokenizer", "ChatGLM4Tokenizer"
_NUM_RESERVED = 256
_GLM4_BEGIN = ("[gMASK]", "<sop>")
"""The tokens at the beginning of each of GLM-4's texts."""

Loaded = tuple[tokenizers.Tokenizer, dict[str, str]]
"""A tokenizer, and special tokens by name; {}: tokenizer_config.json has these."""


def load_ranked_bytes(directory: Path) -> Loaded | None:
    """Loads a directory's tekken.json, tiktoken.model, or tokenizer.model of this form.

    Returns:
        None if the directory has none of these, or one of another kind.

    Raises:
        EngineStartError: the file is malformed.
    """
    for name, load in ((TEKKEN, _load_tekken), (TIKTOKEN, _load_kimi), (_GLM4, _load_glm4)):
        if (path := directory / name).is_file():
            try:
                return load(path)
            except Exception as error:
                raise EngineStartError(
                    f"cannot read {path}: {type(error).__name__}: {one_line(error)}"
                ) from error
    return None


def _load_tekken(path: Path) -> Loaded:
    content = read_json_object(path)
    config, found = content["config"], content.get("special_tokens")
    if found is None:
        raise ValueError(
            "it has no special_tokens, as files of 2024; take the model's tokenizer.json"
        )
    num_special = config["default_num_special_tokens"]
    special = [f"<SPECIAL_{rank}>" for rank in range(num_special)]
    for each in found:
        special[each["rank"]] = each["token_str"]
    count = config["default_vocab_size"] - num_special
    ranked = [base64.b64decode(each["token_bytes"]) for each in content["vocab"][:count]]
    tokenizer = _tokenizer(
        ranked,
        [config["pattern"]],
        first=num_special,
        added={i: AddedToken(t, special=True) for i, t in enumerate(special)},
    )
    bos = _OF_TEKKEN["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.index(bos))]
    )
    return tokenizer, {name: text for name, text in _OF_TEKKEN.items() if text in special}


def _load_kimi(path: Path) -> Loaded | None:
    settings = read_json_object(path.parent / "tokenizer_config.json")
    if settings.get("tokenizer_class") != _OF_KIMI:
        return None
    ranked = _ranked_tokens(path)
    reserved = range(len(ranked), len(ranked) + _NUM_RESERVED)
    added = {each: AddedToken(f"<|reserved_token_{each}|>", special=True) for each in reserved}
    added |= _added_tokens(settings)
    return _tokenizer(ranked, PRE_TOKENIZERS["kimi-k2"].patterns, first=0, added=added), {}


def _load_glm4(path: Path) -> Loaded | None:
    settings = read_json_object(path.parent / "tokenizer_config.json")
    if settings.get("tokenizer_class") != _OF_GLM4:
        return None
    patterns, added = PRE_TOKENIZERS["chatglm-bpe"].patterns, _added_tokens(settings)
    tokenizer = _tokenizer(_ranked_tokens(path), patterns, first=0, added=added)
    numbers = {token.content: number for number, token in added.items()}
    begin = " ".join(_GLM4_BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A $B",
        special_tokens=[(token, numbers[token]) for token in _GLM4_BEGIN],
    )
    return tokenizer, {}


def _ranked_tokens(path: Path) -> list[bytes]:
    """Reads lines of a token, in base 64, and its rank."""
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    ranked = sorted(ranks, key=lambda token: ranks[token])
    if [ranks[token] for token in ranked] != list(range(len(ranked))):
        raise ValueError("its ranks are not 0, 1, 2 and so on")
    return ranked


def _added_tokens(settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns the added tokens of a tokenizer_config.json by their ids."""
    return {
        int(number): AddedToken(token["content"], special=bool(token.get("special")))
        for number, token in settings.get("added_tokens_decoder", {}).items()
    }


def _tokenizer(
    ranked: Sequence[bytes], patterns: Sequence[str], *, first: int, added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """
    Args:
        ranked: the tokens in the order of their ranks.
        patterns: what cuts texts into words.
        first: the id of the first token.
        added: further tokens, by their ids.
    """
    texts = ["".join(map(CHARACTERS.__getitem__, token)) for token in ranked]
    vocabulary = {text: first + rank for rank, text in enumerate(texts)}
    merges = [
        (text[:cut], text[cut:])
        for text in texts
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    vocabulary |= {token.content: number for number, token in added.items()}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    return tokenizer
