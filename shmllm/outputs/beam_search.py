"""BeamSearchOutput: the result of `LLM.beam_search`, with vLLM's names and meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmllm.outputs.logprobs import Logprob


@dataclass
class BeamSearchSequence:
    """One sequence of a beam search: the prompt and one continuation.

    Attributes:
        tokens: the token ids of the prompt and the continuation.
        logprobs: for each generated token, a dict from the ids of the tokens that the search
            considered at this position to their log-probabilities.
        cum_logprob: the sum of the log-probabilities of the generated tokens.
        text: the text of prompt and continuation. The search sets it when it ends.
        finish_reason: "stop" (an end-of-sequence token, or a structured output that is complete),
            "length", "abort" or "error" (also if no token is allowed).
        stop_reason: always None; the field exists for programs that were written for vLLM.
        lora_request: the adapter of the prompt; None without one.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: None = None
    lora_request: Any = None


@dataclass
class BeamSearchOutput:
    """The best sequences for one prompt.

    Attributes:
        sequences: at most `beam_width` sequences, those with the highest score first.
    """

    sequences: list[BeamSearchSequence]
