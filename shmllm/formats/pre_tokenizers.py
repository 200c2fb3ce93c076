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


def _cased(suffix: str, digits: str, but: str = "", ends: str = "/") -> str:
    """The pattern of GPT-4o, Tekken and Kimi, which cuts where lower case changes to upper case.

    Args:
        suffix: what words may end with.
        digits: how many digits are together.
        but: an intersection with which classes of letters end.
        ends: what punctuation may end with, beside ends of lines.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{ends}]*|{_SPACES}"
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
_CASED = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    r"\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    r"\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""The letters of words for DeepSeek-LLM: those of some scripts that have upper and lower cases."""
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    )
)
_YOUTU = PreTokenizer(
    (
        r"[\uac00-\ud7a3\u3131-\u318e]+"
        r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _cased(f"(?i:{_SUFFIX})?", ""),
    ),
    takes_whole_words=True,
)
_HAN = r"&&[^\p{Han}]"
_KIMI_K2 = PreTokenizer((rf"\p{{Han}}+|{_cased(f'(?i:{_SUFFIX})?', '{1,3}', but=_HAN, ends='')}",))
_BROAD_WORDS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_QWEN35 = (
    rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
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
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))
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
    "falcon-h1": _LLAMA3,
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
    "joyai-llm": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": _KIMI_K2,
    "youtu": _YOUTU,
    "kanana2": _GPT4O,
    "llama4": _GPT4O,
    "tiny_aya": _TINY_AYA,
    "solar-open": PreTokenizer((_gpt4(""),)),
    "kormo": PreTokenizer((_gpt4(""),)),
    "f2llmv2": PreTokenizer((_gpt4(""),)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _gpt4("+")), takes_whole_words=True),
    "viking": PreTokenizer((_BROAD_WORDS, _DIGIT)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BROAD_WORDS,))),
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "gigachat": _WORDS,
    "a.x-4.0": _WORDS,
    "mellum": _WORDS,
    "trillion": _WORDS,
    "qwen35": PreTokenizer((_QWEN35,), normalizer="NFC"),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "jina-v2-de"), _WORDS),
    **dict.fromkeys(("jina-v2-es", "jina-de", "jina-es", "modern-bert", "roberta-bpe"), _WORDS),
    "jina-v5-nano": _LLAMA3,
    "glm5": PreTokenizer(_LLAMA3.patterns, takes_whole_words=True),
    "mellum2": _WORDS_AND_DIGITS,
    "grok-2": PreTokenizer((_gpt4(""),)),
    "hy_v4": _DEEPSEEK3,
    "cohere2moe": _TINY_AYA,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
}
"""By the name in the file. "default" stands for files without a name too, as in llama.cpp."""
