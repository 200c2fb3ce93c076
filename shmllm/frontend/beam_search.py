"""`LLM.beam_search`: a loop that generates one token for all beams at once.

This module owns the beams and their scores. The engine gets ordinary requests for one token with
log-probabilities. Because of the prefix cache, such a request computes little more than the tokens
that are new in its beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from shmllm.errors import RequestError
from shmllm.frontend.constraints.followed import FollowedGrammar
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.progress import Shown, shown_count
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.beam_search import BeamSearchOutput, BeamSearchSequence
from shmllm.outputs.request import RequestOutput
from shmllm.params.beam_search import BeamSearchParams
from shmllm.params.ranges import MAX_SCORED_IDS
from shmllm.params.sampling import SamplingParams

ScoreKey = Callable[[BeamSearchSequence], float]


def score_of(sequence: BeamSearchSequence, length_penalty: float) -> float:
    """The score of a sequence, by the formula of transformers and of vLLM 0.33: the sum of the
    log-probabilities of the generated tokens, divided by their number to the power of
    `length_penalty`."""
    return float(sequence.cum_logprob / max(len(sequence.logprobs), 1) ** length_penalty)


def _check_scores(mode: str, params: BeamSearchParams) -> None:
    """Raise RequestError if an engine with this `logprobs_mode` reports other numbers than the
    log-probabilities of all tokens, of which scores are the sums."""
    if mode == "raw_logprobs":
        return
    is_plain = params.allowed_token_ids is None and params.structured_outputs is None
    if mode == "processed_logprobs" and is_plain and not params.temperature:
        return
    only_when = ", or beams without temperature and constraints" if "logprobs" in mode else ""
    raise RequestError(
        f"beam_search sums log-probabilities, of which the engine's logprobs_mode={mode!r} reports "
        f"others: it needs 'raw_logprobs'{only_when}"
    )


@dataclass(slots=True)
class _Beam:
    """
    Attributes:
        sequence: the tokens and their log-probabilities.
        grammar: the state of the generated tokens in the grammar; None without one.
        allowed: the tokens that may follow, in ascending order; None: all.
    """

    sequence: BeamSearchSequence
    grammar: FollowedGrammar | None = None
    allowed: list[int] | None = None

    def successors(self, output: RequestOutput) -> list[_Beam]:
        """The beams with one more of the tokens that the output has log-probabilities for. They
        have the grammar's state of this beam."""
        logprobs = output.outputs[0].logprobs[0]
        if self.allowed is not None:
            allowed = set(self.allowed)
            logprobs = {token: each for token, each in logprobs.items() if token in allowed}
        sequence = self.sequence
        return [
            _Beam(
                BeamSearchSequence(
                    [*sequence.tokens, token],
                    [*sequence.logprobs, logprobs],
                    sequence.cum_logprob + logprob.logprob,
                ),
                self.grammar,
            )
            for token, logprob in logprobs.items()
            if math.isfinite(logprob.logprob)
        ]


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    request: PreparedRequest
    beams: list[_Beam]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def end(self, beams: Collection[_Beam], reason: str) -> None:
        """End some of the beams."""
        for beam in beams:
            beam.sequence.finish_reason = reason
            self.completed.append(beam.sequence)
        self.beams = [beam for beam in self.beams if beam.sequence.finish_reason is None]

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
                self.end(self.beams, reason)
                return
        pairs = zip(self.beams, outputs, strict=True)
        found = [each for beam, output in pairs for each in beam.successors(output)]
        found.sort(key=lambda beam: key(beam.sequence), reverse=True)
        self.beams = found
        self.end([beam for beam in found if beam.sequence.tokens[-1] in end_ids], "stop")
        self.beams = self.beams[:width]
        for beam in self.beams:
            if beam.grammar is not None:
                beam.grammar = beam.grammar.behind(beam.sequence.tokens[-1])
        complete = [beam for beam in self.beams if beam.grammar and beam.grammar.is_complete]
        self.end(complete, "stop")


class BeamSearch:
    """A beam search on one front end.

    Args:
        front_end: the front end that runs the requests.
        params: the parameters of the search.

    Raises:
        RequestError: the engine's `max_logprobs` is less than the search needs, its `logprobs_mode`
            has other numbers than scores are made of, or the tokens of a prompt attend to those
            behind them.
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
        _check_scores(info.logprobs_mode, params)
        num_alternatives = min(2 * params.beam_width, info.vocab_size)
        if num_alternatives > info.max_logprobs:
            raise RequestError(
                f"a beam_width of {params.beam_width} needs {num_alternatives} logprobs; the "
                f"engine's max_logprobs is {info.max_logprobs}"
            )
        self._front_end = front_end
        self._params = params
        self._max_model_len = info.max_model_len
        self._num_alternatives = num_alternatives
        # A beam whose next token is constrained considers more: some of them are not allowed.
        self._num_constrained = min(max(num_alternatives, MAX_SCORED_IDS), info.max_logprobs)
        ids = params.allowed_token_ids
        self._allowed = None if ids is None else sorted(set(ids))
        self._end_ids = frozenset(() if params.ignore_eos else info.eos_token_ids)
        self._key: ScoreKey = lambda sequence: score_of(sequence, params.length_penalty)

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedRequest]:
        """The requests from which the beams of prompts begin.

        Raises:
            RequestError: a prompt or a constraint is wrong, or a prompt has embeddings.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=self._params.temperature,
            structured_outputs=self._params.structured_outputs,
            allowed_token_ids=self._params.allowed_token_ids,
        )
        requests = self._front_end.prepare(prompts, params)
        if any(request.submitted.embeds is not None for request in requests):
            raise RequestError("beam_search needs token ids or text, not prompt_embeds")
        return requests

    def run(
        self, requests: Sequence[PreparedRequest], concurrency_limit: int | None, shown: Shown
    ) -> list[BeamSearchOutput]:
        """Search for the best sequences of each prompt.

        Args:
            requests: what `prepare` returned.
            concurrency_limit: the number of prompts to search at a time; None for all.
            shown: whether a bar shows the progress, in tokens of a sequence.

        Raises:
            RequestError: the grammar cannot be compiled for the model's tokenizer.
        """
        size = max(len(requests) if concurrency_limit is None else concurrency_limit, 1)
        begins = range(0, len(requests), size)
        grammar = self._grammar(requests)
        outputs: list[BeamSearchOutput] = []
        total = len(begins) * self._params.max_tokens
        with shown_count(total, shown, label="beam search", unit="tokens") as on_tokens:
            for begin in begins:
                searches = [
                    _Search(request, [_Beam(BeamSearchSequence(request.prompt_token_ids), grammar)])
                    for request in requests[begin : begin + size]
                ]
                self._run_together(searches, on_tokens)
                outputs += map(self._output, searches)
        return outputs

    def _grammar(self, requests: Sequence[PreparedRequest]) -> FollowedGrammar | None:
        """The state before the first token in the grammar that all requests have, if they do."""
        text = requests[0].submitted.grammar if requests else ""
        if not text:
            return None
        info, directory = self._front_end.info, self._front_end.tokenizer_directory
        num_outputs = info.num_outputs or info.vocab_size
        return FollowedGrammar.begin(text, directory, info.eos_token_ids, num_outputs)

    def _run_together(self, searches: list[_Search], on_tokens: Callable[[int], object]) -> None:
        for num_done in range(self._params.max_tokens):
            for search in searches:
                self._constrain(search)
            open_searches = [search for search in searches if self._can_go_on(search)]
            requests = [
                search.request.continued(beam.sequence.tokens, self._step_params(beam))
                for search in open_searches
                for beam in search.beams
            ]
            if not requests:
                on_tokens(self._params.max_tokens - num_done)
                return
            outputs = iter(self._front_end.run(requests, show_progress=False))
            for search in open_searches:
                own = [next(outputs) for _ in search.beams]
                search.advance(own, self._end_ids, self._params.beam_width, self._key)
            on_tokens(1)

    def _constrain(self, search: _Search) -> None:
        """Finds out which tokens may follow the beams, and ends those that none may follow."""
        for beam in search.beams:
            beam.allowed = self._allowed
            if beam.grammar is not None:
                allowed = beam.grammar.allowed()
                if self._allowed is not None:
                    allowed = sorted(set(allowed).intersection(self._allowed))
                beam.allowed = allowed
        search.end([beam for beam in search.beams if beam.allowed == []], "error")

    def _step_params(self, beam: _Beam) -> SamplingParams:
        """The parameters of a beam's request for one token.

        Up to MAX_SCORED_IDS allowed tokens are all scored. Of more, those among the most likely
        ones are, and the one that is sampled, which is the most likely one at temperature 0.
        """
        temperature, allowed = self._params.temperature, beam.allowed
        if allowed is None:
            count = self._num_alternatives
            return SamplingParams(
                logprobs=count, max_tokens=1, temperature=temperature, detokenize=False
            )
        is_scored = len(allowed) <= MAX_SCORED_IDS
        return SamplingParams(
            logprobs=None if is_scored else self._num_constrained,
            logprob_token_ids=allowed if is_scored else None,
            allowed_token_ids=allowed,
            max_tokens=1,
            temperature=temperature,
            detokenize=False,
        )

    def _can_go_on(self, search: _Search) -> bool:
        return bool(search.beams) and len(search.beams[0].sequence.tokens) < self._max_model_len

    def _output(self, search: _Search) -> BeamSearchOutput:
        search.end(search.beams, "length")
        best = sorted(search.completed, key=self._key, reverse=True)[: self._params.beam_width]
        for sequence in best:
            sequence.lora_request = search.request.submitted.lora
            sequence.text = self._text(self._front_end.tokenizer, sequence)
        return BeamSearchOutput(best)

    def _text(self, tokenizer: Tokenizer, sequence: BeamSearchSequence) -> str:
        params, tokens, end = self._params, sequence.tokens, ""
        if tokens[-1] in self._end_ids and sequence.finish_reason == "stop":
            tokens, last = tokens[:-1], tokens[-1:]
            if params.include_stop_str_in_output:
                end = tokenizer.decode(last, skip_special_tokens=False)
        return tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens) + end
