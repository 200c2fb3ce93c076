"""Reads the tokenizer of a model directory: front ends tokenize with it, and engines compile
grammars for its vocabulary.

`tokenizers` reads a tokenizer.json, and is given what a tekken.json, or a tiktoken.model or a
tokenizer.model of a known kind says. Other directories need transformers, which takes seconds to
import; this module imports it only for them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from shmllm.errors import EngineStartError
from shmllm.formats.added_tokens import text_of_token
from shmllm.formats.metaspace import without_metaspace
from shmllm.formats.ranked_bytes import TEKKEN, TIKTOKEN, load_ranked_bytes
from shmllm.formats.sentence_piece import SENTENCE_PIECE, load_sentence_piece
from shmllm.formats.text_files import one_line, read_json_object, read_text

FAST_FILE = "tokenizer.json"
_PIECES = (SENTENCE_PIECE, "spiece.model", "sentencepiece.bpe.model", "spm.model", "source.spm")
"""The names that files of sentencepiece have."""
FALLBACK_FILES = (TEKKEN, TIKTOKEN, *_PIECES, "vocab.json", "vocab.txt", "tokenizer.tiktoken")
_CLASSES_WITHOUT_FILES = ("ByT5Tokenizer",)
"""The classes of transformers whose vocabulary is in no file: its tokens are the bytes."""
_NEEDED_FOR_PIECES = ("sentencepiece", "google.protobuf")
TOKEN_TYPES = "token_type_ids"
_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
"""Of added tokens."""
_PADDED_ON_THE_LEFT = ("GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer")
"""The classes of tokenizers of image-text models that transformers lets pad on the left."""
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """
    Attributes:
        tokenizer: a `tokenizers.Tokenizer`, or one of transformers that is not based on one.
        special_tokens: the special tokens that the model has, by name ("eos_token": "</s>").
        has_token_types: whether the model gets the token types that the template gives pairs.
    """

    tokenizer: Any
    special_tokens: dict[str, str]
    has_token_types: bool = False


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has files that `load_tokenizer` reads.

    Raises:
        EngineStartError: its tokenizer_config.json is malformed.
    """
    if any((directory / name).is_file() for name in (FAST_FILE, *FALLBACK_FILES)):
        return True
    config = read_json_object(directory / "tokenizer_config.json")
    return config.get("tokenizer_class") in _CLASSES_WITHOUT_FILES


def load_tokenizer(directory: Path) -> LoadedTokenizer:
    """Loads the tokenizer of a model directory.

    Raises:
        EngineStartError: the directory has no tokenizer files, or they cannot be read.
    """
    path = directory / FAST_FILE
    if path.is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # its Rust code may panic, which is no Exception
            raise EngineStartError(f"cannot read {path}: {one_line(error)}") from error
        names = _named_special_tokens(directory)
        _add_missing(tokenizer, directory, names)
        return LoadedTokenizer(tokenizer, names, _has_token_types(directory))
    if (found := load_ranked_bytes(directory)) is not None:
        tokenizer, names = found
        return LoadedTokenizer(tokenizer, names | _named_special_tokens(directory))
    if (found := load_sentence_piece(directory)) is not None:
        tokenizer, names = found
        return LoadedTokenizer(tokenizer, names | _named_special_tokens(directory))
    if has_tokenizer(directory):
        return _load_with_transformers(directory)
    raise EngineStartError(
        f"no tokenizer in {directory}: looked for {FAST_FILE}, {', '.join(FALLBACK_FILES)}; "
        "copy them there from the model that the weights were trained from"
    )


def pads_left(directory: Path) -> bool:
    """Returns whether transformers fills texts on the left, by "padding_side" of a directory's
    tokenizer_config.json, or by the class of the tokenizer.

    Raises:
        EngineStartError: the file is malformed.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    side = config.get("padding_side")
    is_left = config.get("tokenizer_class") in _PADDED_ON_THE_LEFT
    return is_left if side is None else side == "left"


def file_or_text(directory: Path) -> str:
    """Returns what llguidance reads: the path of a directory's tokenizer.json, or a text of that
    kind if there is none, or if it has a decoder that llguidance does not know.

    Raises:
        EngineStartError: as `load_tokenizer`; or the tokenizer cannot be written as such a text.
        OSError, ValueError: the tokenizer.json cannot be read.
    """
    path = directory / FAST_FILE
    if path.is_file():
        return without_metaspace(read_text(path)) or str(path)
    tokenizer = load_tokenizer(directory).tokenizer
    if isinstance(tokenizer, tokenizers.Tokenizer):
        text = str(tokenizer.to_str())
        return without_metaspace(text) or text
    raise EngineStartError(
        f"{directory} has no {FAST_FILE}, and its tokenizer cannot be converted to one"
    )


def _load_with_transformers(directory: Path) -> LoadedTokenizer:
    try:
        transformers = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        inner = getattr(tokenizer, "backend_tokenizer", None)
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    except Exception as error:
        raise EngineStartError(
            f"{directory} has no {FAST_FILE}, and transformers cannot load its tokenizer either"
            f"{_lacking(directory) or f' ({type(error).__name__}: {one_line(error)})'}"
        ) from error
    if isinstance(inner, tokenizers.Tokenizer):
        has_types = TOKEN_TYPES in getattr(tokenizer, "model_input_names", ())
        return LoadedTokenizer(inner, names, has_types)
    return LoadedTokenizer(tokenizer, names)


def _lacking(directory: Path) -> str:
    """What transformers lacks for a file of sentencepiece, which its own errors do not always say;
    empty if nothing."""
    found = [name for name in _PIECES if _has_pieces(directory / name)]
    if not found or all(map(_is_installed, _NEEDED_FOR_PIECES)):
        return ""
    return f": {found[0]} needs `pip install sentencepiece protobuf`"


def _has_pieces(path: Path) -> bool:
    """Whether a file is sentencepiece's: a message whose first field is a list. Files of the same
    names may be tiktoken's, which are text."""
    try:
        return path.is_file() and path.read_bytes()[:1] == b"\n"
    except OSError:
        return False


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def _has_token_types(directory: Path) -> bool:
    """Whether transformers gives the model the token types that the template gives pairs.

    It does if the "model_input_names" of the tokenizer's file or, without them, of its class have
    them. The generic classes do not; of others, those whose models have types (BERT's) do, and the
    templates of the rest give all tokens type 0.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    names = config.get("model_input_names")
    if isinstance(names, list):
        return TOKEN_TYPES in names
    return config.get("tokenizer_class") not in _GENERIC_CLASSES


def _add_missing(tokenizer: Any, directory: Path, names: Mapping[str, str]) -> None:
    """Add the tokens of which only the files beside a tokenizer.json know, as transformers does,
    where their ids are the next ones."""
    found = read_json_object(directory / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(found, dict):
        listed = read_json_object(directory / "added_tokens.json")
        special = set(names.values())
        found = {
            str(n): {"content": text, "special": text in special} for text, n in listed.items()
        }
    tokens = {
        int(number): (text, token)
        for number, token in found.items()
        if number.isdecimal() and (text := text_of_token(token)) and isinstance(token, dict)
    }
    for number, (text, token) in sorted(tokens.items()):
        if tokenizer.token_to_id(text) is None and number == tokenizer.get_vocab_size():
            flags = {name: token.get(name) is True for name in _FLAGS}
            tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])


def _named_special_tokens(directory: Path) -> dict[str, str]:
    config = read_json_object(directory / "tokenizer_config.json")
    named = read_json_object(directory / "special_tokens_map.json")
    named = {name: named.get(name) for name in _NAMED_SPECIAL_TOKENS}
    named |= {name: config[name] for name in _NAMED_SPECIAL_TOKENS if name in config}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        extra = config.get(key)
        if isinstance(extra, dict):
            named |= extra
    # A token is either its text, or an object with the text under "content".
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
