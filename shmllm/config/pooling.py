"""What an engine computes of prompts beside tokens, or instead of them: vectors, scores, labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
"""What is computed of a prompt: an embedding, one of each token, scores of classes, or such scores
of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """
    Attributes:
        tasks: what the model can compute; empty: the engine was started to generate only.
        task: the one that a call without a task means.
        pooling_type: which hidden states make a vector: "CLS", "LAST" or "MEAN".
        normalize: whether embeddings have the length 1 unless a request says otherwise.
        embedding_size: the width of an embedding.
        head: "projection": embeddings go through one; "classifier"; "sparse": embeddings are sparse
            vectors, with a component for each token of the vocabulary; "multi": token_embed has a
            projection, and token_classify one to a weight; empty: none of these.
        activation: what makes scores of a classifier's logits: "sigmoid", "softmax" or "none"; or a
            sparse vector of the largest logits: "log1p_relu" or "log1p_log1p_relu"; or weights of
            tokens: "relu".
        logit_mean: what is subtracted from a classifier's logits before their activation.
        pair_template: the prompt of a pair, with ``{query}`` and ``{document}``; empty: there is
            none.
        pair_end: the tokens behind it.
        text_length: to how many tokens texts are filled with padding; 0: they are not.
        padding_token: what fills them if the tokenizer does not say.
        ends: the tokens that begin and end texts, which have no such weights, nor has the first one
            an embedding for late interaction; empty: all have both.
        labels: the names of the classes, by index.
        both_ways: whether tokens attend to those behind them, so that a prompt is one step.
        generates: whether the engine generates tokens.
        matryoshka: whether the model was trained for truncated embeddings.
        matryoshka_dimensions: the widths that it was trained for; empty: any.
        prompts: texts that belong before texts of some use, by the name of the use.
        markers: the beginnings of such texts that are one token each, if the vocabulary has them.
        default_prompt: the name of the one that sentence-transformers takes unless told otherwise;
            empty: none.
        include_prompt: whether a mean has the tokens of such a prompt.
        token_types: whether tokens of the second text of a pair have another type.
        separates_pairs: whether the tokenizer's template joins the texts of a pair; else the second
            is put behind the first.
    """

    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")
    task: PoolingTask = "embed"
    pooling_type: str = "LAST"
    normalize: bool = True
    embedding_size: int = 0
    head: str = ""
    activation: str = "none"
    labels: tuple[str, ...] = ()
    both_ways: bool = False
    generates: bool = True
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    markers: tuple[str, ...] = ()
    default_prompt: str = ""
    include_prompt: bool = True
    token_types: bool = False
    separates_pairs: bool = True
    ends: tuple[int, ...] = ()
    logit_mean: float = 0.0
    pair_template: str = ""
    pair_end: tuple[int, ...] = ()
    text_length: int = 0
    padding_token: int = 0

    @property
    def spans_prompts(self) -> bool:
        """Whether an engine that generates attends to all of a prompt from each of its tokens, so
        that an output is no output any more as the end of a prompt."""
        return self.both_ways and self.generates

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> PoolingInfo:
        """Returns what `dataclasses.asdict` and JSON have made a dict of."""
        names = ("tasks", "labels", "matryoshka_dimensions", "markers", "ends", "pair_end")
        tuples = {name: tuple(values[name]) for name in names}
        return cls(**{**values, **tuples})
