"""The options of speculative decoding: who drafts tokens, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.config.options import Flag, Free, Number, OneOf, Section, Whole, option
from shmllm.errors import EngineStartError

Method = Literal["ngram", "suffix", "draft_model", "mtp", "eagle", "eagle3", "dflash", "medusa"]
METHODS_WITHOUT_MODEL: tuple[Method, ...] = ("ngram", "suffix", "mtp")
"""The methods that need no other model than the engine's."""
METHODS_OF_HEADS: tuple[Method, ...] = ("eagle", "eagle3", "dflash", "medusa")
"""The methods of heads, which read hidden states of the model."""
METHODS_OF_MODELS: tuple[Method, ...] = ("draft_model", *METHODS_OF_HEADS)
"""The methods of other models, in directories of their own."""
MOST_DRAFTING = 64
"""The largest number of requests for which tokens are drafted in a step: with more, steps are no
longer bound by reading the weights."""
MOST_DRAFTED = 32
"""The largest number of tokens that are drafted for a request at a time."""

_DEFAULT_DRAFTED: dict[Method, int] = {
    "ngram": 8,
    "suffix": 16,
    "draft_model": 3,
    "mtp": 1,
    "eagle": 3,
    "eagle3": 3,
    "dflash": 7,
    "medusa": 3,
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(Section):
    """Speculative decoding, the option `speculative_config` of an engine, with vLLM's names.

    Attributes:
        model_directory: the directory of `model`.
    """

    method: Method | None = option(
        None,
        'Who drafts: "ngram" finds what followed the last tokens before, "suffix" does so in the '
        'outputs of other requests, too, "draft_model" is a smaller model, "mtp" are layers of the '
        'model itself that predict further tokens, "eagle", "eagle3", "dflash" and "medusa" are '
        "in files of their own and read hidden states of the model.",
        OneOf(get_args(Method), optional=True),
    )
    num_speculative_tokens: int | None = option(
        None,
        "Most tokens that are drafted for a request in a step.",
        Whole(1, MOST_DRAFTED, optional=True),
        default_text=", ".join(f"{each}: {count}" for each, count in _DEFAULT_DRAFTED.items()),
        flag="--draft-tokens",
    )
    prompt_lookup_max: int | None = option(
        None, "Most tokens at the end that ngram looks for.", Whole(1, 64, optional=True)
    )
    prompt_lookup_min: int | None = option(
        None, "Fewest tokens at the end that ngram looks for.", Whole(1, 64, optional=True)
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "Most tokens of a stretch that suffix knows, matched and drafted.", Whole(2, 256)
    )
    suffix_decoding_max_cached_requests: int = option(
        10_000, "Most earlier outputs that suffix looks into; 0: none.", Whole(0)
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "Most tokens that suffix drafts for each token that it matched.", Number()
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "Smallest estimated probability of a token that suffix drafts.", Number(1)
    )
    model: str | None = option(None, "The model that drafts.", Free())
    adaptive: bool = option(
        True,
        "Draft fewer tokens, or none, where measured steps and acceptance say that it costs time.",
        Flag(),
    )
    model_directory: str = ""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.method is not None and self.lookup_min > self.lookup_max:
            raise EngineStartError(
                f"prompt_lookup_min ({self.lookup_min}) must be at most prompt_lookup_max "
                f"({self.lookup_max})"
            )

    @property
    def most_drafted(self) -> int:
        """The largest number of tokens that are drafted for a request in a step; 0: drafting is
        off."""
        if self.method is None:
            return 0
        return self.num_speculative_tokens or _DEFAULT_DRAFTED[self.method]

    @property
    def reads_states(self) -> bool:
        """Whether a head drafts that reads hidden states of the model."""
        return self.method in METHODS_OF_HEADS

    @property
    def lookup_max(self) -> int:
        """The largest number of tokens that ngram looks for. Where only the smallest is given, it
        is that, as in vLLM."""
        return self.prompt_lookup_max or self.prompt_lookup_min or LOOKUP_MAX

    @property
    def lookup_min(self) -> int:
        """The smallest number of tokens that ngram looks for. Where only the largest is given, it
        is that, as in vLLM."""
        return self.prompt_lookup_min or self.prompt_lookup_max or LOOKUP_MIN


LOOKUP_MAX, LOOKUP_MIN = 5, 2
