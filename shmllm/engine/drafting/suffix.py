"""Drafts what most often followed the last tokens, in the request and in earlier outputs.

This is suffix decoding (arXiv 2411.04975). A draft begins behind the occurrences of the last
tokens, as many of them as `length`, and takes the token that most of the occurrences go on with, as
long as a sufficient share of them does. That share estimates the probability that the draft is
right up to there, and the sum of these shares how many drafted tokens are accepted. Of the drafts
for each `length`, and of those from the request and from earlier outputs, the one with the largest
sum counts.

This module must not know how occurrences are found.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.request import Request, RequestStatus
from shmllm.engine.drafting.occurrences import END, SIZES, Occurrences

MOST_CACHED_TOKENS = 2**20
"""The largest number of tokens of earlier outputs, which take less than 40 MB."""
MOST_EXPECTED = 2**16
"""The largest number of tokens for which a request's tables are made."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that probably follow.

    Attributes:
        token_ids: the tokens.
        score: the expected number of accepted ones.
    """

    token_ids: Sequence[int] = ()
    score: float = 0.0


NOTHING = Draft()
_score = attrgetter("score")


class Rules:
    """How a draft is made from occurrences.

    Args:
        config: the options of suffix decoding.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        depth = config.suffix_decoding_max_tree_depth
        factor = config.suffix_decoding_max_spec_factor
        self.num_matched = depth - 1
        self._limits = [min(int(length * factor), depth - length) for length in range(depth)]
        self._least_share = config.suffix_decoding_min_token_prob

    def draft(self, history: Occurrences, tail: array[int], most: int) -> Draft:
        """The best draft from the occurrences in a text.

        Args:
            history: the text.
            tail: the last `num_matched` tokens of the request, or all of them.
            most: the largest number of tokens.
        """
        best, longest = NOTHING, len(tail)
        for size in SIZES:
            if size <= longest and self._limit(size, longest, most) > best.score:
                found = history.find(tail[-longest:], size)
                best = self._improve(best, history.text, found, size, most)
            longest = min(longest, size - 1)
        return best

    def _limit(self, shortest: int, longest: int, most: int) -> int:
        """The largest number of tokens that may be drafted behind a match of some length."""
        return min(most, max(self._limits[shortest : longest + 1]))

    def _improve(
        self, best: Draft, text: array[int], found: dict[int, list[int]], shortest: int, most: int
    ) -> Draft:
        """A draft, or a better one from some occurrences.

        Args:
            best: the draft.
            text: the text with the occurrences.
            found: the places behind the occurrences, by the length of the match.
            shortest: the smallest length that a set of occurrences may stand for.
            most: the largest number of tokens.
        """
        options = []
        for length in sorted(found):
            options.append((self._limit(shortest, length, most), length))
            shortest = length + 1
        for limit, length in sorted(options, reverse=True):
            if limit > best.score:
                sets = (places for each, places in found.items() if each >= length)
                places = sorted(chain.from_iterable(sets), reverse=True)
                best = max(best, self._follow(text, places, limit), key=_score)
        return best

    def _follow(self, text: array[int], places: list[int], limit: int) -> Draft:
        """The draft that most occurrences go on with; of as many, the latest."""
        paths = Counter(text[place : place + limit].tobytes() for place in places)
        going_on = [(array("i", path), count) for path, count in paths.items()]
        token_ids, score = array("i"), 0.0
        for step in range(limit):
            going_on = [(path, count) for path, count in going_on if step < len(path)]
            votes: Counter[int] = Counter()
            for path, count in going_on:
                votes[path[step]] += count
            token_id, count = votes.most_common(1)[0] if votes else (END, 0)
            if token_id == END or count < self._least_share * len(places):
                break
            token_ids.append(token_id)
            score += count / len(places)
            going_on = [each for each in going_on if each[0][step] == token_id]
        return Draft(token_ids, score)


class EarlierOutputs:
    """The outputs of requests that ended, in two generations. When the younger one is full, the
    older one is forgotten, and a new one begins.

    Args:
        most: the largest number of outputs.
    """

    def __init__(self, most: int) -> None:
        self._most_young = max(most // 2, 1)
        self._keeps_old = most > 1
        self._num_young = 0
        self.generations: list[Occurrences] = []

    def add(self, token_ids: array[int]) -> None:
        """Remember an output; of one that is too long, the beginning."""
        token_ids = token_ids[: MOST_CACHED_TOKENS // 2 - 1]
        if self._is_full(len(token_ids) + 1):
            young = Occurrences(array("i"), MOST_CACHED_TOKENS // 2)
            self.generations = [young, *self.generations[: int(self._keeps_old)]]
            self._num_young = 0
        young = self.generations[0]
        young.text.extend(token_ids)
        young.text.append(END)
        young.index()
        self._num_young += 1

    def _is_full(self, num_more: int) -> bool:
        if not self.generations or self._num_young == self._most_young:
            return True
        return len(self.generations[0].text) + num_more > MOST_CACHED_TOKENS // 2


class SuffixDrafter:
    """
    Requests with a cache salt draft from their own tokens, and others draft nothing from theirs:
    who sets a salt does not want others to notice the contents of a request.

    Args:
        config: the options of suffix decoding.
    """

    catches_up = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._rules = Rules(config)
        most = config.suffix_decoding_max_cached_requests
        self._earlier = EarlierOutputs(most) if most else None
        self._sharing: list[Request] = []

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        own: Occurrences | None = request.drafting
        if own is None:
            own = request.drafting = self._begin(request)
        own.index()
        tail = request.token_ids[-self._rules.num_matched :]
        histories = [own]
        if self._earlier is not None and not request.cache_salt:
            histories += self._earlier.generations
        drafts = [self._rules.draft(each, tail, most) for each in histories]
        return max(drafts, key=_score).token_ids

    def _begin(self, request: Request) -> Occurrences:
        if self._earlier is not None and not request.cache_salt:
            self._take_outputs(self._earlier)
            self._sharing.append(request)
        num_expected = min(request.num_tokens + request.num_tokens_left, MOST_EXPECTED)
        return Occurrences(request.token_ids, num_expected)

    def _take_outputs(self, earlier: EarlierOutputs) -> None:
        """Remember the outputs of requests that ended since another one began."""
        running = []
        for each in self._sharing:
            if each.status is RequestStatus.FINISHED:
                earlier.add(each.token_ids[each.num_prompt_tokens :])
            else:
                running.append(each)
        self._sharing = running
