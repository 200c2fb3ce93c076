"""How texts are cut into words before byte-level BPE, by the names in `tokenizer.ggml.pre`.

A GGUF file has only a name. The patterns are those of the models' own tokenizers, in the notation
of `tokenizers`, as llama.cpp (src/llama-vocab.cpp) and transformers list them. Names whose patterns
are not known for certain are left out: wrong words give wrong tokens without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_SUFFIX = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_SUFFIX}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _gpt4(digits: str) -> str:
    """The pattern of GPT-4 and its descendants, with the given numbers of digits together."""
    return (
        rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(suffix: str, digits: str) -> str:
    """The pattern of GPT-4o and Tekken, which cuts where lower case changes to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """
    Attributes:
        patterns: each cuts what the patterns before it left, and keeps the pieces between matches.
        takes_whole_words: whether a word that is a token is not built from merges.
        adds_bos: whether a text begins with the token `bos` if the file does not say.
        normalizer: a Unicode normal form, or None.
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False
    normalizer: str | None = None

    def as_json(self) -> Json:
        """The entry `pre_tokenizer` of tokenizer.json."""
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in self.patterns
        ]
        bytes_: Json = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, bytes_]}


_SEED_CODER = (
    rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_EXAONE_MOE = (
    rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+"
)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_AFMOE = PreTokenizer(
    (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # threes from the right
        _ASIAN,
        _PUNCTUATED,
    )
)
_DEEPSEEK3 = PreTokenizer(
    (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _PUNCTUATED)
)
_QWEN35 = (
    rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_WORDS = PreTokenizer((_GPT2,))
_NFC_WORDS = PreTokenizer((_GPT2,), normalizer="NFC")
_WORDS_AND_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3 = PreTokenizer((_gpt4("{1,3}"),), takes_whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_gpt4(""),), normalizer="NFC")
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", _DIGIT)
)
_GPT4O = PreTokenizer((_cased(f"(?i:{_SUFFIX})?", "{1,3}"),))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _WORDS,
    "phi-2": _WORDS,
    "mpt": _WORDS,
    "olmo": _NFC_WORDS,
    "jais": _WORDS,
    "granite-docling": _WORDS,
    "smollm": _WORDS_AND_DIGITS,
    "starcoder": _WORDS_AND_DIGITS,
    "refact": _WORDS_AND_DIGITS,
    "codeshell": _WORDS_AND_DIGITS,
    "exaone4": _WORDS,
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "command-r": PreTokenizer(_WORDS_AND_DIGITS.patterns, normalizer="NFC"),
    "exaone": _WORDS_AND_DIGITS,
    "minerva-7b": _WORDS_AND_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.patterns),
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "glm4": PreTokenizer(_LLAMA3.patterns),
    "chatglm-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.patterns),
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    "tekken": PreTokenizer((_cased("", ""),), takes_whole_words=True, adds_bos=True),
    "gpt-4o": _GPT4O,
    "minimax-m2": _GPT4O,
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "afmoe": _AFMOE,
    "hunyuan": PreTokenizer((_gpt4(""),)),
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "qwen35": PreTokenizer((_QWEN35,), normalizer="NFC"),
}
"""By the name in the file. "default" stands for files without a name too, as in llama.cpp."""
