"""The special tokens of Whisper and others, by which a prompt says what becomes of a sound."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shmllm.errors import RequestError
from shmllm.formats.text_files import read_text
from shmllm.frontend.text.tokenizer import Tokenizer

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_BEGIN, _NO_TIMESTAMPS, _END = "<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_LATEST_FIRST = "max_initial_timestamp_index"
_FIRST_TIME = "<|0.00|>"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """
    Attributes:
        begin: the token that begins a transcript.
        end: the token that ends it.
        languages: the tokens of languages by their codes; none: the model knows one language.
        tasks: the tokens of "transcribe" and "translate"; none, likewise.
        no_timestamps: the token behind which no timestamps follow.
        first_time: the first timestamp, which all tokens behind it are.
        no_speech: the token that says that nobody speaks; None: there is none.
        suppress: tokens that are never sampled.
        suppress_first: tokens that are not sampled first.
        latest_first: how many timestamps behind the first one may begin a transcript.
    """

    begin: int
    end: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int
    first_time: int
    no_speech: int | None
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    latest_first: int

    @classmethod
    def of(cls, added: Mapping[str, int], directory: Path) -> Self:
        """That of a model.

        Args:
            added: the tokens that its tokenizer never splits, by their texts.
            directory: has its generation_config.json.

        Raises:
            RequestError: it has no such tokens, or generation_config.json is malformed.
        """
        missing = [text for text in (_BEGIN, _NO_TIMESTAMPS, _END) if text not in added]
        if missing:
            raise RequestError(_lacks(missing[0]))
        generation = _generation(directory / "generation_config.json")
        languages: dict[str, int] = {}
        tasks: dict[str, int] = {}
        if generation.get("is_multilingual") is not False:
            found = ((_LANGUAGE.fullmatch(text), token) for text, token in added.items())
            languages = {match[1]: token for match, token in found if match}
            named = ((name, added.get(f"<|{name}|>")) for name in ("transcribe", "translate"))
            tasks = {name: token for name, token in named if token is not None}
        no_timestamps, end = added[_NO_TIMESTAMPS], generation.get("eos_token_id")
        return cls(
            begin=added[_BEGIN],
            end=end if isinstance(end, int) else added[_END],
            languages=languages,
            tasks=tasks,
            no_timestamps=no_timestamps,
            first_time=added.get(_FIRST_TIME, no_timestamps + 1),
            no_speech=next((added[text] for text in _NO_SPEECH if text in added), None),
            suppress=_ids(generation, "suppress_tokens"),
            suppress_first=_ids(generation, "begin_suppress_tokens"),
            latest_first=_latest_first(generation),
        )

    def prompt(self, language: str, task: str, timestamps: bool) -> list[int]:
        """The tokens that a transcript begins with."""
        ids = [self.begin]
        if self.languages:
            ids.append(self.languages[language])
        if self.tasks:
            ids.append(self.tasks[task])
        return ids if timestamps else [*ids, self.no_timestamps]

    def rules(self, timestamps: bool) -> dict[str, Any]:
        """The fields of `worker.transcription.Rules`."""
        rules: dict[str, Any] = {
            "suppress": [*self.suppress, self.no_timestamps],
            "suppress_first": [*self.suppress_first, self.end],
            "end": self.end,
        }
        if timestamps:
            rules |= {
                "timestamps": self.first_time,
                "latest_first": self.first_time + self.latest_first,
            }
        return rules


def _generation(path: Path) -> dict[str, Any]:
    content = json.loads(read_text(path)) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _latest_first(generation: Mapping[str, Any]) -> int:
    """How late a transcript may begin, which is a second if the model does not say it."""
    found = generation.get(_LATEST_FIRST)
    if found is None:
        return 50
    if type(found) is not int or found < 0:
        raise RequestError(
            f"{_LATEST_FIRST} in the model's generation_config.json must be a whole number of at "
            f"least 0, not {found!r}"
        )
    return found


def _ids(generation: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Tokens that generation_config.json lists; -1, in some files, is none."""
    found = generation.get(name) or []
    return tuple(each for each in found if isinstance(each, int) and each >= 0)


def suppressed_tokens(directory: Path) -> tuple[int, ...]:
    """Returns the tokens that are never sampled, by generation_config.json of a model."""
    return _ids(_generation(directory / "generation_config.json"), "suppress_tokens")


def ids_of_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of tokens with spaces between them.

    Raises:
        RequestError: the tokenizer lacks one.
    """
    tokens = text.split()
    found = [tokenizer.token_to_id(token) for token in tokens]
    missing = [token for token, id_ in zip(tokens, found, strict=True) if id_ is None]
    if missing:
        raise RequestError(_lacks(missing[0]))
    return [each for each in found if each is not None]


def _lacks(token: str) -> str:
    return f"the model's tokenizer lacks {token}, so it writes no transcripts"
