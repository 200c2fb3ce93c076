"""Whether a transcript of a window is to be trusted: Whisper's measures (Radford et al., 2022,
section 4.5)."""

from __future__ import annotations

import math
import zlib

from shmllm.outputs.request import CompletionOutput

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""A window whose transcript is not good enough is transcribed again at the next one."""
LEAST_LOGPROB = -1.0
"""The least mean log-probability of the tokens."""
MOST_COMPRESSION = 2.4
"""How many times smaller zlib makes a text at most: others repeat themselves."""
MOST_NO_SPEECH = 0.6
"""If the tokens are less likely than LEAST_LOGPROB, from this probability on nobody speaks."""


def mean_logprob(output: CompletionOutput, first_time: float = math.inf) -> float:
    """The mean log-probability of an output's tokens of text, as the model gave them; 0 without
    any. Timestamps are left out, which rules may have forced: the tokens from `first_time` on."""
    pairs = zip(output.token_ids, output.logprobs or (), strict=True)
    found: list[float] = [
        alternatives[token].logprob for token, alternatives in pairs if token < first_time
    ]
    return sum(found) / max(len(found), 1)


def is_good(logprob: float, text: str) -> bool:
    """Whether a transcript with this mean log-probability is kept."""
    return logprob >= LEAST_LOGPROB and compression(text) <= MOST_COMPRESSION


def is_silent(logprob: float) -> bool:
    """Whether nobody speaks, by the log-probability of the token that says so."""
    return logprob > math.log(MOST_NO_SPEECH)


def compression(text: str) -> float:
    """How many times smaller zlib makes a text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
