"""One request as a front end submits it to an engine core.

The front end fills it in, `wire` encodes and decodes it, and `EngineCore.add` takes it, so its
fields are listed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmllm.params.items import Item
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import Pooling
from shmllm.params.sampling import SamplingParams, TokenSequences
from shmllm.params.thinking import ThinkingBudget


@dataclass(slots=True)
class EngineCoreRequest:
    """
    Attributes:
        number: identifies the request. The front end counts it up and never reuses a number.
        prompt_token_ids: at least one token id. If `embeds` is given, the ids are placeholders.
        params: SamplingParams to generate tokens, Pooling to compute one vector of the prompt.
            Only the fields that the engine acts on are transmitted.
        cache_salt: requests share prefix-cache blocks only with requests of the same salt.
        priority: requests with lower numbers are scheduled first under the policy "priority".
        bad_words: the token sequences of `params.bad_words`, which only the front end can
            tokenize.
        grammar: the grammar that the output has to match, in llguidance's text format; an empty
            string means any output.
        thinking: the `thinking_token_budget` with its tokens; None for no limit.
        extra_args: `params.extra_args` as JSON text, if the engine has custom logits processors and
            there are any; else empty.
        embeds: a (tokens, hidden) tensor that replaces the prompt's token embeddings, or None.
            It is transmitted in a record of its own, ahead of the request.
        items: the images of the prompt, in order; each is transmitted in a record of its own, ahead
            of the request.
        encoder_token_ids: the text that the model's encoder reads; empty: the model has none, or
            its encoder reads an item.
        lora: the adapter that the request is computed with, or None.
        seed: the 64 bits, as a signed number, from which its random draws follow.
        is_sibling: whether it is a further completion of the prompt of the request before it. The
            engine does not need to know.
    """

    number: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams | Pooling
    cache_salt: str = ""
    priority: int = 0
    bad_words: TokenSequences = ()
    grammar: str = ""
    thinking: ThinkingBudget | None = None
    extra_args: str = ""
    embeds: Any = None
    items: tuple[Item, ...] = ()
    encoder_token_ids: Sequence[int] = ()
    lora: LoRARequest | None = None
    seed: int = 0
    is_sibling: bool = False

    @property
    def computed_token_ids(self) -> Sequence[int]:
        """All tokens that are computed before the output, those of an encoder's text first."""
        if not self.encoder_token_ids:
            return self.prompt_token_ids
        return [*self.encoder_token_ids, *self.prompt_token_ids]


def unseeded(engine_seed: int, number: int) -> int:
    """The seed of a request for which the user gave none: the same one in each run of a program
    with an engine of its own, and at each engine that gets the request. It is below 0, unlike
    those that most users give.

    Args:
        engine_seed: the seed of the front end's engine.
        number: the number of the request.
    """
    return -(2**63) + ((engine_seed % 2**31 << 32) + number + 1) % 2**63
