"""The method of `LLM` that computes log-probabilities of given tokens, and what methods share: the
IO processor and adapters.

This module owns what users see of that, as `llm` does for generation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from shmllm.config.info import EngineInfo
from shmllm.frontend import scoring
from shmllm.frontend.adapters import Adapters
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.io_processing import make_io_processor
from shmllm.frontend.progress import Shown
from shmllm.frontend.prompts import Prompt, as_list
from shmllm.plugins.io_processor import IOProcessor


class ScoringCalls:
    """
    Attributes:
        front_end, facts: see `LLM`.
        model_defaults: the sampling defaults that come with the model.
    """

    front_end: FrontEnd
    facts: EngineInfo
    model_defaults: dict[str, Any]
    _io_processor: IOProcessor[Any, Any] | None
    _io_processor_name: str | None

    def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        raise NotImplementedError

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        use_tqdm: Shown = False,
        lora_request: Adapters = None,
    ) -> list[list[float]]:
        """Compute the log-probabilities of given completions under the weights in force.

        Args:
            prompts: as for `generate`, but no embeddings.
            completions: the token ids of one completion for each prompt; a completion may be empty.
                Prompt i with completion i has at most `max_model_len` tokens.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.
            lora_request: as for `generate`.

        Returns:
            A list for each prompt, in their order, with a float32 number for each token of its
            completion, given the prompt and the tokens before. They are the numbers that
            `prompt_logprobs` reports, bit for bit, so `logprobs_mode` may make logits of them.
            The temperature is 1. An update of the weights during the call may fall between two
            prompts, and between two chunks of a prompt.

        Raises:
            RequestError: a prompt or a completion is wrong, and nothing was queued; or another
                call, such as `pause_generation("abort")`, ended the scoring.
            EngineDeadError: the engine died.
        """
        requests = scoring.prepare(self.front_end, as_list(prompts), completions)
        self._set_adapters(requests, lora_request)
        with closing(self.front_end.run_each(requests, use_tqdm)) as ended:
            scores = {
                state.index: scoring.scores_of(state, len(completions[state.index]))
                for state in ended
            }
        return [scores[index] for index in sorted(scores)]

    def find_io_processor(self) -> IOProcessor[Any, Any]:
        """The IO processor, which is made at the first call.

        Raises:
            EngineStartError: there is none, or it cannot be made.
        """
        if self._io_processor is None:
            own = weakref.ref(self)  # a circle would outlive its last user
            self._io_processor = make_io_processor(
                self._io_processor_name,
                self.facts,
                self.model_defaults,
                lambda: own().get_tokenizer(),  # type: ignore[union-attr]
            )
        return self._io_processor

    def _set_adapters(self, requests: list[PreparedRequest], lora_request: Adapters) -> None:
        """Set the adapters of requests; the engine reads those that it does not know."""
        adapters = self.front_end.adapters.set(requests, lora_request)
        self.front_end.add_adapters(adapters)
