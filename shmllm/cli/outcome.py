"""How the texts of a command ended: exit codes, and the lines on stderr that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shmllm.outputs.request import RequestOutput
    from shmllm.params.sampling import SamplingParams

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE_ENDED = 3
"""The engine died, or it ended requests before their ends, or takes none."""

ABORTED = "abort"
WHY_ABORTED = "the engine was stopped, paused or put to sleep and aborted requests"


class TextOutcome:
    """Counts how texts ended.

    Args:
        params: the sampling parameters of all texts.
        max_model_len: the engine's limit of the tokens of prompt and output together.
    """

    def __init__(self, params: SamplingParams, max_model_len: int) -> None:
        self._params = params
        self._max_model_len = max_model_len
        self._num_requests = self._num_texts = 0
        self._num_failed = self._num_aborted = self._num_out_of_tokens = self._num_out_of_room = 0

    def add(self, output: RequestOutput) -> None:
        """Count the finished output of a request."""
        self._num_requests += 1
        self._num_failed += output.error is not None
        for text in output.outputs:
            self._num_texts += 1
            self._num_aborted += text.finish_reason == ABORTED
            if text.finish_reason == "length":
                has_all = len(text.token_ids) == self._params.max_tokens
                self._num_out_of_tokens += has_all
                self._num_out_of_room += not has_all

    def report(self) -> int:
        """Say on stderr which texts are not complete, each reason in one line.

        Returns:
            The exit code.
        """
        if self._num_failed and self._num_requests > 1:
            _say(f"{self._num_failed:,} of {self._num_requests:,} requests failed")
        if self._num_aborted:
            _say(f"{WHY_ABORTED}; {self._texts(self._num_aborted, 'is', 'are')} cut off")
        if self._num_out_of_tokens:
            count = self._texts(self._num_out_of_tokens, "was", "were")
            limit = f"{self._params.max_tokens:,} tokens"
            _say(f"{count} cut off after {limit}; a larger --max-tokens allows more")
        if self._num_out_of_room:
            count = self._texts(self._num_out_of_room, "was", "were")
            limit = f"{self._max_model_len:,} tokens of prompt and output together"
            _say(f"{count} cut off by max_model_len, {limit}")
        if self._num_aborted:
            return EXIT_ENGINE_ENDED
        return EXIT_FAILED if self._num_failed else 0

    def _texts(self, count: int, one: str, many: str) -> str:
        """The subject and verb of a sentence about `count` of the texts."""
        if self._num_texts == 1:
            return f"the text {one}"
        return f"{count:,} of {self._num_texts:,} texts {one if count == 1 else many}"


def _say(line: str) -> None:
    click.echo(f"shmllm: {line}", err=True)
