"""Prompts of models whose encoder reads text: what it reads, and what the decoder begins with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.prompts import ParsedPrompt, require_unicode
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.truncation import Truncation
from shmllm.frontend.token_checks import check_known

_LANGUAGE = re.compile(r"__[a-z]{2,3}__|[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")
"""The tokens that name languages: M2M100's, and those of mBART and NLLB."""


class EncoderTexts:
    """
    Args:
        tokenizer: turns texts into token ids.
        info: what the engine says of itself. Its model's encoder reads text.
    """

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._most = info.items.most_embeds
        self._beginning = list(info.items.decoder_prompt)
        self._classifies = "classify" in info.pooling.tasks

    def divide(
        self, names: Sequence[str], prompts: Sequence[ParsedPrompt], truncation: Truncation | None
    ) -> None:
        """Set what the encoder reads of each prompt, and the token ids of the decoder's. A prompt
        in one part is what the encoder reads.

        Args:
            names: what errors call each.
            prompts: the prompts.
            truncation: how texts for the encoder that are too long are cut; None refuses them.

        Raises:
            RequestError: a prompt is empty, too long or of another kind.
        """
        for name, prompt in zip(names, prompts, strict=True):
            if prompt.encoder is None:
                prompt.encoder = ParsedPrompt(prompt.text, prompt.token_ids, "", prompt.embeds)
                prompt.text = prompt.token_ids = prompt.embeds = None
            prompt.cache_salt = prompt.cache_salt or prompt.encoder.cache_salt
            if prompt.encoder.embeds is not None or prompt.embeds is not None:
                raise RequestError(
                    f"{name} has 'prompt_embeds', and the model's encoder reads text"
                )
        found = self._read_by_encoder(names, prompts, truncation)
        for name, prompt, ids in zip(names, prompts, found, strict=True):
            self._check(name, ids)
            prompt.encoder_token_ids = ids
            of_decoder = self._of_classifier if self._classifies else self._of_decoder
            prompt.token_ids = of_decoder(name, prompt)
            prompt.text = prompt.text or None

    def _read_by_encoder(
        self, names: Sequence[str], prompts: Sequence[ParsedPrompt], truncation: Truncation | None
    ) -> list[list[int]]:
        every = [prompt.encoder for prompt in prompts if prompt.encoder is not None]
        texts = [each.text or "" for each in every if each.token_ids is None]
        for name, each in zip(names, every, strict=True):
            require_unicode(name, each.text or "")
        cut: dict[str, Any] = {} if truncation is None else truncation.of_text(self._most)
        encoded = iter(map(self._with_language, texts, self._tokenizer.encode_batch(texts, **cut)))
        return [
            next(encoded)
            if each.token_ids is None
            else each.token_ids
            if truncation is None
            else truncation.of_tokens(each.token_ids, self._most)
            for each in every
        ]

    def _with_language(self, text: str, ids: list[int]) -> list[int]:
        """The tokens of a text without the language that the tokenizer's template writes before
        that with which the text begins."""
        first = text.split(" ", 1)[0]
        if not _LANGUAGE.fullmatch(first) or len(ids) < 2:
            return ids
        written, own = (self._tokenizer.id_to_token(token_id) or "" for token_id in ids[:2])
        return ids[1:] if own == first and _LANGUAGE.fullmatch(written) else ids

    def _check(self, name: str, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError(f"{name} is empty: the model's encoder needs at least one token")
        if len(ids) > self._most:
            or_cut = ", or pass truncate_prompt_tokens" if self._classifies else ""
            raise RequestError(
                f"{name} has {len(ids):,} tokens, and the model's encoder reads at most "
                f"{self._most:,}: shorten it{or_cut}",
                parameter="input_tokens",
                value=len(ids),
            )
        check_known(name, ids, self._info)

    def _of_classifier(self, name: str, prompt: ParsedPrompt) -> list[int]:
        """The token ids of the decoder of a classifier: it reads the text, too, and predicts its
        next token in training, so the last one predicts the end."""
        ids = prompt.encoder_token_ids
        if prompt.token_ids or prompt.text:
            raise RequestError(f"{name} has a decoder_prompt: the decoder reads the encoder's text")
        if ids[-1] not in self._info.eos_token_ids:
            raise RequestError(f"{name} does not end with the model's end-of-sequence token")
        return [*self._beginning[:1], *ids[:-1]]

    def _of_decoder(self, name: str, prompt: ParsedPrompt) -> list[int]:
        """The token ids that the output continues. They begin with the model's own first one."""
        if not prompt.token_ids and not prompt.text and not self._beginning:
            raise RequestError(
                f"{name}: the model's files have no decoder_start_token_id: pass "
                '{"encoder_prompt": ..., "decoder_prompt": ...}'
            )
        return ids_of_decoder(prompt, self._beginning, self._tokenizer)


def ids_of_decoder(prompt: ParsedPrompt, begin: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that a decoder begins with.

    Args:
        prompt: the prompt of the decoder.
        begin: the model's own ones, which an empty prompt stands for; others begin with the first
            of them.
        tokenizer: turns texts into token ids.
    """
    if not prompt.token_ids and not prompt.text:
        return list(begin)
    ids = prompt.token_ids
    if ids is None:
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=False)
    return ids if not begin or ids[0] == begin[0] else [begin[0], *ids]
