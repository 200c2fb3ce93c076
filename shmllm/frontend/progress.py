"""Progress bars on stderr: BatchProgress for requests that generate tokens, TextProgress for texts
that are only read, CountProgress for other things; and CallersProgress for a bar of the caller's
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from shmllm.frontend.request_state import RequestState
from shmllm.outputs.pooling import PoolingRequestOutput
from shmllm.outputs.request import RequestOutput

REFRESH_PERIOD_S = 0.1

Shown = bool | Callable[..., Any]
"""Whether progress is shown: True shows a bar on stderr; a function such as `tqdm`, called with
`total` and `desc`, makes a bar with the methods `update(number)` and `close()`."""


class Progress(Protocol):
    """What shows the progress of a batch, between `__enter__` and `__exit__`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def update(self, changed: list[RequestState]) -> None:
        """Count what a poll has brought: the states that it changed."""


def progress_of(total: int, shown: Shown, *, generates: bool = True) -> Progress:
    """What shows the progress of a batch.

    Args:
        total: the number of requests; nothing is shown without any.
        shown: see `Shown`.
        generates: whether they generate tokens.
    """
    if total and callable(shown):
        return CallersProgress(total, shown)
    is_shown = bool(shown and total)
    if generates:
        return BatchProgress(total, is_shown)
    return TextProgress(total, is_shown, label="reading")


class CallersProgress:
    """Shows the number of finished requests by a bar of the caller's.

    Args:
        total: the number of requests.
        make_bar: see `Shown`.
    """

    def __init__(self, total: int, make_bar: Callable[..., Any]) -> None:
        self._bar = make_bar(total=total, desc="Processed prompts")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def update(self, changed: list[RequestState]) -> None:
        """Count the requests that ended."""
        num_ended = sum(state.ends_request for state in changed)
        if num_ended:
            self._bar.update(num_ended)


class _Progress:
    """A progress bar. If stderr is not a terminal, it writes only the final line.

    Args:
        total: the number of requests; None if it is unknown.
        enabled: False shows nothing.
        num_done: the number of requests that were finished before.
        is_live: False writes only the final line, for a terminal to which results go, too.
        label: what happens to the requests.
    """

    def __init__(
        self,
        total: int | None,
        enabled: bool,
        *,
        num_done: int = 0,
        is_live: bool = True,
        label: str,
    ) -> None:
        self._done = num_done
        self._began = time.monotonic()
        self._next_refresh = 0.0
        self._bar = None
        if enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn(label),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True, force_terminal=None if is_live else False),
            )
            self._task = self._bar.add_task("", total=total, completed=num_done, rates="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._refresh()
            self._bar.stop()

    def update(self, changed: list[RequestState]) -> None:
        """Count what a poll has brought.

        Args:
            changed: the states that the poll changed.
        """
        if self._bar is None:
            return
        for state in changed:
            self._done += state.ends_request
            self._count_state(state)
        self._refresh_if_due()

    def finish(self, output: Any) -> None:
        """Count a finished request.

        Args:
            output: its output; None for a request that the engine did not accept.
        """
        if self._bar is None:
            return
        self._done += 1
        if output is not None:
            self._count_output(output)
        self._refresh_if_due()

    def _count_state(self, state: RequestState) -> None:
        """Count the tokens of a state that changed."""
        raise NotImplementedError

    def _count_output(self, output: Any) -> None:
        """Count the tokens of a finished request."""
        raise NotImplementedError

    def _rates(self, elapsed_s: float) -> str:
        """The rates in this time, as text."""
        raise NotImplementedError

    def _refresh_if_due(self) -> None:
        if time.monotonic() >= self._next_refresh:
            self._refresh()

    def _refresh(self) -> None:
        assert self._bar is not None
        now = time.monotonic()
        self._next_refresh = now + REFRESH_PERIOD_S
        rates = self._rates(max(now - self._began, 1e-9))
        self._bar.update(self._task, completed=self._done, rates=rates)


class BatchProgress(_Progress):
    """Shows the progress of a batch: finished requests, tokens per second, prefix-cache hits.

    Args:
        total, enabled, options: see `_Progress`.
    """

    def __init__(self, total: int | None, enabled: bool, **options: Any) -> None:
        super().__init__(total, enabled, label="generating", **options)
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._counted: dict[int, int] = {}

    def _count_state(self, state: RequestState) -> None:
        self._tokens += len(state.token_ids) - self._counted.pop(state.number, 0)
        if state.finish_reason is None:
            self._counted[state.number] = len(state.token_ids)
        else:
            self._prompt_tokens += len(state.request.prompt_token_ids)
            self._cached_tokens += state.num_cached_tokens

    def _count_output(self, output: RequestOutput) -> None:
        self._tokens += sum(len(one.token_ids) for one in output.outputs)
        self._prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens += output.num_cached_tokens

    def _rates(self, elapsed_s: float) -> str:
        hits = 100 * self._cached_tokens / max(self._prompt_tokens, 1)
        return f"{self._tokens / elapsed_s:,.0f} tokens/s, prefix hits {hits:.0f} %"


class TextProgress(_Progress):
    """Shows how many texts have been read, and how many texts and tokens per second.

    Args:
        total, enabled, label, options: see `_Progress`.
    """

    def __init__(self, total: int | None, enabled: bool, *, label: str, **options: Any) -> None:
        super().__init__(total, enabled, label=label, **options)
        self._texts = self._tokens = 0

    def _count_state(self, state: RequestState) -> None:
        if state.ends_request:
            self._count(len(state.request.prompt_token_ids))

    def _count_output(self, output: PoolingRequestOutput[Any]) -> None:
        self._count(len(output.prompt_token_ids))

    def _count(self, num_tokens: int) -> None:
        self._texts += 1
        self._tokens += num_tokens

    def _rates(self, elapsed_s: float) -> str:
        return f"{self._texts / elapsed_s:,.0f} texts/s, {self._tokens / elapsed_s:,.0f} tokens/s"


class CountProgress(_Progress):
    """Shows how many things are done, and how many in a second.

    Args:
        total: the number of things.
        enabled: False shows nothing.
        label: what happens to them.
        unit: their name, in the plural.
    """

    def __init__(self, total: int, enabled: bool, *, label: str, unit: str) -> None:
        super().__init__(total, enabled, label=label)
        self._unit = unit

    def add(self, count: int) -> None:
        """Count things that are done now."""
        if self._bar is not None:
            self._done += count
            self._refresh_if_due()

    def _rates(self, elapsed_s: float) -> str:
        return f"{self._done / elapsed_s:,.1f} {self._unit}/s"


@contextmanager
def shown_count(
    total: int, shown: Shown, *, label: str, unit: str
) -> Iterator[Callable[[int], object]]:
    """Shows a bar, of ours or the caller's, that counts things. Yields what adds to it.

    Args:
        total: the number of things.
        shown: see `Shown`.
        label, unit: see `CountProgress`; a bar of the caller's gets the label as its `desc`.
    """
    if callable(shown):
        bar = shown(total=total, desc=label)
        try:
            yield bar.update
        finally:
            bar.close()
        return
    with CountProgress(total, bool(shown and total), label=label, unit=unit) as progress:
        yield progress.add
