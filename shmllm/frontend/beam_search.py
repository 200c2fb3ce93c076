"""`LLM.beam_search`: a loop that generates one token for all beams at once.

This module owns the beams and their scores. The engine gets ordinary requests for one token with
log-probabilities. Because of the prefix cache, such a request computes little more than the tokens
that are new in its beam.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.beam_search import BeamSearchOutput, BeamSearchSequence
from shmllm.outputs.request import RequestOutput
from shmllm.params.beam_search import BeamSearchParams
from shmllm.params.sampling import SamplingParams

ScoreKey = Callable[[BeamSearchSequence], float]


def score_of(
    sequence: BeamSearchSequence, end_ids: Collection[int], length_penalty: float
) -> float:
    """The score of a sequence, by vLLM's formula.

    The score is the sum of the log-probabilities of the generated tokens, divided by the number of
    prompt and generated tokens, without an end-of-sequence token at the end, to the power of
    `length_penalty`.
    """
    length = len(sequence.tokens) - (sequence.tokens[-1] in end_ids)
    return float(sequence.cum_logprob / max(length, 1) ** length_penalty)


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    request: PreparedRequest
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def advance(
        self, outputs: Sequence[RequestOutput], end_ids: Collection[int], width: int, key: ScoreKey
    ) -> None:
        """Replace the beams by the best of their successors.

        Args:
            outputs: the output of each beam's request for one token.
            end_ids: the tokens that end a sequence.
            width: the number of beams to keep.
            key: the score of a sequence.
        """
        reasons = {output.outputs[0].finish_reason for output in outputs}
        for reason in ("error", "abort"):
            if reason in reasons:
                for beam in self.beams:
                    beam.finish_reason = reason
                self.completed, self.beams = self.completed + self.beams, []
                return
        successors: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            for token, logprob in output.outputs[0].logprobs[0].items():
                successor = BeamSearchSequence(
                    [*beam.tokens, token],
                    [*beam.logprobs, output.outputs[0].logprobs[0]],
                    beam.cum_logprob + logprob.logprob,
                )
                if token in end_ids:
                    successor.finish_reason = "stop"
                    self.completed.append(successor)
                else:
                    successors.append(successor)
        self.beams = sorted(successors, key=key, reverse=True)[:width]


class BeamSearch:
    """A beam search on one front end.

    Args:
        front_end: the front end that runs the requests.
        params: the parameters of the search.

    Raises:
        RequestError: the engine's `max_logprobs` is less than the search needs, or the tokens of a
            prompt attend to those behind them.
    """

    def __init__(self, front_end: FrontEnd, params: BeamSearchParams) -> None:
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"beam_search takes a BeamSearchParams, got {type(params).__name__}")
        info = front_end.info
        if info.pooling.spans_prompts:
            raise RequestError(
                "beam_search is not possible for this model: it puts tokens behind prompts, and "
                "prompts attend to all of themselves"
            )
        num_alternatives = min(2 * params.beam_width, info.vocab_size)
        if num_alternatives > info.max_logprobs:
            raise RequestError(
                f"a beam_width of {params.beam_width} needs {num_alternatives} logprobs; the "
                f"engine's max_logprobs is {info.max_logprobs}"
            )
        self._front_end = front_end
        self._params = params
        self._max_model_len = info.max_model_len
        self._step_params = SamplingParams(
            logprobs=num_alternatives,
            max_tokens=1,
            temperature=params.temperature,
            detokenize=False,
        )
        model_ends = frozenset(info.eos_token_ids)
        self._end_ids = frozenset() if params.ignore_eos else model_ends
        self._key: ScoreKey = lambda beam: score_of(beam, model_ends, params.length_penalty)

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedRequest]:
        """The requests from which the beams of prompts begin.

        Raises:
            RequestError: a prompt is wrong, or has embeddings.
        """
        requests = self._front_end.prepare(prompts, self._step_params)
        if any(request.submitted.embeds is not None for request in requests):
            raise RequestError("beam_search needs token ids or text, not prompt_embeds")
        return requests

    def run(
        self, requests: Sequence[PreparedRequest], concurrency_limit: int | None
    ) -> list[BeamSearchOutput]:
        """Search for the best sequences of each prompt.

        Args:
            requests: what `prepare` returned.
            concurrency_limit: the number of prompts to search at a time; None for all.
        """
        size = len(requests) if concurrency_limit is None else concurrency_limit
        outputs: list[BeamSearchOutput] = []
        for begin in range(0, len(requests), max(size, 1)):
            searches = [
                _Search(request, [BeamSearchSequence(list(request.prompt_token_ids))])
                for request in requests[begin : begin + size]
            ]
            self._run_together(searches)
            outputs += map(self._output, searches)
        return outputs

    def _run_together(self, searches: list[_Search]) -> None:
        for _ in range(self._params.max_tokens):
            open_searches = [search for search in searches if self._can_go_on(search)]
            requests = [
                search.request.with_tokens(beam.tokens)
                for search in open_searches
                for beam in search.beams
            ]
            if not requests:
                return
            outputs = iter(self._front_end.run(requests, show_progress=False))
            for search in open_searches:
                own = [next(outputs) for _ in search.beams]
                search.advance(own, self._end_ids, self._params.beam_width, self._key)

    def _can_go_on(self, search: _Search) -> bool:
        return bool(search.beams) and len(search.beams[0].tokens) < self._max_model_len

    def _output(self, search: _Search) -> BeamSearchOutput:
        for beam in search.beams:
            beam.finish_reason = "length"
        ended = sorted(search.completed + search.beams, key=self._key, reverse=True)
        best = ended[: self._params.beam_width]
        for sequence in best:
            sequence.text = self._text(self._front_end.tokenizer, sequence)
        return BeamSearchOutput(best)

    def _text(self, tokenizer: Tokenizer, sequence: BeamSearchSequence) -> str:
        params, tokens, end = self._params, sequence.tokens, ""
        if sequence.finish_reason == "stop":
            tokens, last = tokens[:-1], tokens[-1:]
            if params.include_stop_str_in_output:
                end = tokenizer.decode(last, skip_special_tokens=False)
        return tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens) + end
