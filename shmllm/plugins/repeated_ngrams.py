"""NoRepeatedNGrams: a logits processor under which an output repeats no long sequence of tokens.

Models that read pages, such as DeepSeek-OCR, may write the same row of a table without end. A
request asks for it by `SamplingParams(extra_args={"ngram_size": 30, "window_size": 90})`; the names
and their meaning are those of vLLM's processor for DeepSeek-OCR.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

USUAL_WINDOW = 100


def repeating_tokens(output: list[int], ngram_size: int, window_size: int) -> set[int]:
    """Returns the tokens that would make the end of an output a sequence which it has already.

    Args:
        output: the tokens of the output.
        ngram_size: the number of tokens of the sequence, at least 1.
        window_size: how many of the last tokens are searched.
    """
    num_before = ngram_size - 1
    if len(output) < ngram_size:
        return set()
    end = output[len(output) - num_before :]
    begins = range(max(len(output) - window_size, 0), len(output) - num_before)
    return {output[i + num_before] for i in begins if output[i : i + num_before] == end}


class NoRepeatedNGrams(AdapterLogitsProcessor):
    """Forbids tokens that repeat a sequence. The extra arguments of a request are

    ngram_size: the number of tokens of a sequence that must not be repeated; without it the request
        is free.
    window_size: how many of the output's last tokens are searched; 100 by default.
    whitelist_token_ids: tokens that are never forbidden.
    """

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Check the extra arguments of a request.

        Raises:
            ValueError: one of them is no positive whole number, or no list of token ids.
        """
        given = params.extra_args or {}
        if given.get("ngram_size") is None:
            return
        for name in ("ngram_size", "window_size"):
            value = given.get(name, USUAL_WINDOW)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        listed = given.get("whitelist_token_ids") or ()
        is_list = isinstance(listed, Collection) and not isinstance(listed, str)
        if not is_list or not all(isinstance(each, int) for each in listed):
            raise ValueError(f"whitelist_token_ids must be a list of token ids, got {listed!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        given = params.extra_args or {}
        size = given.get("ngram_size")
        if size is None:
            return None
        window = given.get("window_size", USUAL_WINDOW)
        allowed = frozenset(given.get("whitelist_token_ids") or ())

        def forbid(output: list[int], logits: Any) -> Any:
            if forbidden := repeating_tokens(output, size, window) - allowed:
                logits[sorted(forbidden)] = float("-inf")
            return logits

        return forbid
