"""What an engine says of the items that prompts may have: images, sounds, videos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemInfo:
    """
    Attributes:
        modalities: the kinds of items that the model takes, of `params.items.MODALITIES`.
        width: the number of values of an embedding.
        most_embeds: the most embeddings of one item.
        longest_span: the most embeddings in a row that one step has to compute, because each is
            attended to by those before it; 0: a step may divide all.
        num_encoded: how many positions are before the text of a prompt, for what an encoder
            computes of its item, without which there is no prompt; 0: the model is no
            encoder-decoder.
        decoder_prompt: the tokens that the decoder of an encoder-decoder begins with, unless a
            prompt says otherwise; none: the model's files do not say so.
        cache_bytes: the most bytes of prepared items that a front end keeps, and the engine for
            it.
        sound_adapter: the directory of the adapter that prompts with sounds have, unless they name
            another one; empty: there is none.
    """

    modalities: tuple[str, ...] = ()
    width: int = 0
    most_embeds: int = 0
    longest_span: int = 0
    num_encoded: int = 0
    decoder_prompt: tuple[int, ...] = ()
    cache_bytes: int = 0
    sound_adapter: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The same from the object that JSON has made of it."""
        tuples = {name: tuple(values[name]) for name in ("modalities", "decoder_prompt")}
        return cls(**{**values, **tuples})

    @property
    def has_encoder_text(self) -> bool:
        """Whether the model is an encoder-decoder whose encoder reads text."""
        return "text" in self.modalities

    def __bool__(self) -> bool:
        return bool(self.modalities)
