"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Byte-level BPE ("gpt2"), SentencePiece's BPE with scores and bytes ("llama"), and Gemma 4's, with
merges and bytes ("gemma4"), are here; `encoder_tokenizers` has those of encoders. This module must
not know the model's shapes.
"""

from __future__ import annotations

from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.pieces import (
    CONTROL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    merges_of_scores,
)
from shmllm.formats.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from shmllm.frontend.gguf.encoder_tokenizers import unigram, word_pieces
from shmllm.frontend.gguf.vocabulary import NAMED_IDS, Json, Vocabulary

_NO_VOCABULARY = "none"
_SPACES_TO_LETTERS: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_LETTERS_TO_SPACES: tuple[Json, ...] = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def has_vocabulary(header: GgufHeader) -> bool:
    """Whether a file may have a vocabulary. One of llama.cpp's that says "none" is for token ids
    alone."""
    return header.metadata.get("tokenizer.ggml.model") != _NO_VOCABULARY


def make_tokenizer(header: GgufHeader) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json.

    Raises:
        EngineStartError: the file has no vocabulary, or one of a kind that is not supported.
    """
    vocabulary = Vocabulary(header)
    model = vocabulary.find("model")
    if not isinstance(model, str) or model not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise header.error(f"tokenizer {shown(model)} is not supported; supported: {known}")
    tokenizer, adds_bos = _MAKERS[model](header, vocabulary)
    adds_bos = vocabulary.flag("add_bos_token", adds_bos)
    adds_eos = vocabulary.flag("add_eos_token", False)
    common: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _template(vocabulary, adds_bos, adds_eos),
    }
    return common | tokenizer, _settings(header, vocabulary, adds_bos, adds_eos)


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise header.error(
            f"the pre-tokenizer {shown(name)} (tokenizer.ggml.pre) is not known; known: {known}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(header: GgufHeader, vocabulary: Vocabulary) -> tuple[Json, bool]:
    pre_tokenizer = _pre_tokenizer(header)
    merges = [_pair(merge) for merge in vocabulary.array("merges", str)]
    form = pre_tokenizer.normalizer
    tokenizer = {
        "normalizer": {"type": form} if form else None,
        "pre_tokenizer": pre_tokenizer.as_json(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocabulary, merges, ignore_merges=pre_tokenizer.takes_whole_words),
    }
    return tokenizer, pre_tokenizer.adds_bos


def _pair(merge: str) -> list[str]:
    """The two parts of a merge, which are separated by a space and may begin with one."""
    position = merge.find(" ", 1)
    return [merge[:position], merge[position + 1 :]]


def _sentence_piece(_header: GgufHeader, vocabulary: Vocabulary) -> tuple[Json, bool]:
    normalizers, decoders = [_SPACES_TO_LETTERS], [*_LETTERS_TO_SPACES]
    if vocabulary.flag("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = merges_of_scores(
        vocabulary.tokens, vocabulary.kinds, vocabulary.array("scores", float)
    )
    return _with_bytes(vocabulary, merges, normalizers, decoders), True


def _gemma4(_header: GgufHeader, vocabulary: Vocabulary) -> tuple[Json, bool]:
    merges = [_pair(merge) for merge in vocabulary.array("merges", str)]
    return _with_bytes(vocabulary, merges, [_SPACES_TO_LETTERS], [*_LETTERS_TO_SPACES]), True


def _with_bytes(
    vocabulary: Vocabulary, merges: list[list[str]], normalizers: list[Json], decoders: list[Json]
) -> Json:
    """A tokenizer that merges the characters of a whole text, and has a token for each byte of
    those that are none."""
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges,
            unk_token=vocabulary.named("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(vocabulary: Vocabulary, merges: list[list[str]], **options: Any) -> Json:
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    ids = vocabulary.ids()
    kept = [
        pair for pair in merges if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids
    ]
    return model | options | {"vocab": ids, "merges": kept}


_MAKERS = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma4,
    "bert": word_pieces,
    "t5": unigram,
}
"""What makes a tokenizer, and says whether a text begins with the token `bos` if the file does not,
by llama.cpp's name."""


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """The tokens that are found in texts before anything else: those for control, which are
    special, and those that the model's author has defined."""
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        )
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _template(vocabulary: Vocabulary, adds_bos: bool, adds_eos: bool) -> Json | None:
    """The post-processor that adds the tokens `bos` and `eos` around a text."""
    before = [vocabulary.named("bos_token")] if adds_bos else []
    after = [vocabulary.named("eos_token")] if adds_eos else []
    names = [name for name in (*before, *after) if name is not None]
    if not names:
        return None
    ids = vocabulary.ids()

    def sequence(letter: str, kind: int) -> list[Json]:
        return [
            *({"SpecialToken": {"id": name, "type_id": kind}} for name in before if name),
            {"Sequence": {"id": letter, "type_id": kind}},
            *({"SpecialToken": {"id": name, "type_id": kind}} for name in after if name),
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names
        },
    }


def _settings(header: GgufHeader, vocabulary: Vocabulary, adds_bos: bool, adds_eos: bool) -> Json:
    """The content of tokenizer_config.json."""
    settings: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    settings |= {name: vocabulary.named(name) for name in NAMED_IDS}
    templates = _chat_templates(header)
    if templates:
        settings["chat_template"] = (
            templates["default"]
            if [*templates] == ["default"]
            else [{"name": name, "template": text} for name, text in templates.items()]
        )
    return {name: value for name, value in settings.items() if value is not None}


def _chat_templates(header: GgufHeader) -> dict[str, str]:
    """The chat templates by name."""
    key = "tokenizer.chat_template"
    return {
        ("default" if name == key else name.removeprefix(f"{key}.")): text
        for name, text in header.metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)
    }
