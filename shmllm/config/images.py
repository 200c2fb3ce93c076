"""What an engine says of the images that prompts may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """
    Attributes:
        most_embeds: the most embeddings of one image; 0: the model takes no images.
        longest_span: the most embeddings in a row that one step has to compute, because each is
            attended to by those before it; 0: a step may divide all.
        cache_bytes: the most bytes of prepared images that a front end keeps, and the engine for
            it.
    """

    most_embeds: int = 0
    longest_span: int = 0
    cache_bytes: int = 0
