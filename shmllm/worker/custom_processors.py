"""Runs the logits processors that plugins and options name, on any device.

This module owns the calls and what follows if one raises: the request that it was made for ends. If
that is not known, the requests with `extra_args` end, which are those that pass arguments to
processors; if the processor raises for the others as well, these, too. The others go on as if the
ended ones were not there. This module must not know when the sampler calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from shmllm.core.plan import StepPlan
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    apply_to_row,
)
from shmllm.plugins.qualified_names import in_one_line
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.processor_batch import NOT_IN_BATCH, ProcessorBatch


class NamedProcessor(NamedTuple):
    """A logits processor and the name of its class, "module:Class"."""

    name: str
    processor: LogitsProcessor

    @property
    def functions(self) -> dict[int, Any] | None:
        """The functions of single requests, by index, if the processor changes logits as
        `AdapterLogitsProcessor` does; None if it changes a whole batch."""
        own, base = type(self.processor), AdapterLogitsProcessor
        if not isinstance(self.processor, base):
            return None
        is_plain = own.apply is base.apply and own.update_state is base.update_state
        return self.processor.req_info if is_plain else None

    def failed(self, problem: BaseException) -> str:
        return f"the logits processor {self.name} failed: {in_one_line(problem)}"


class CustomProcessors:
    """The logits processors of an engine.

    Args:
        processors: the processors, in the order in which they are called.
        token_ids: (rows, tokens) int32, the tokens of each row's request, as in `InputBatch`.

    Attributes:
        batch: the requests that the processors know.
    """

    def __init__(self, processors: Sequence[NamedProcessor], token_ids: IntArray) -> None:
        self.all = tuple(processors)
        invariant = [each.processor.is_argmax_invariant() for each in self.all]
        pairs = list(zip(self.all, invariant, strict=True))
        self.for_all = tuple(each for each, is_invariant in pairs if not is_invariant)
        self.for_draws = tuple(each for each, is_invariant in pairs if is_invariant)
        self.batch = ProcessorBatch()
        self.token_ids = token_ids

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the processors' classes."""
        return tuple(each.name for each in self.all)

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError if a processor refuses the parameters of a request."""
        for name, processor in self.all:
            try:
                type(processor).validate_params(params)
            except Exception as problem:
                raise RequestError(
                    f"the logits processor {name} refuses the request: {in_one_line(problem)}"
                ) from problem

    def update(self, plan: StepPlan) -> None:
        """Take note of the requests that left and entered rows since the last plan."""
        self.batch.update(plan)

    def begin(self, rows: LongArray, positions: LongArray) -> ProcessorStep | None:
        """Bring the batch up to date for a step. The tokens of the step before may be missing yet.

        Args:
            rows: (N,) int64, the rows that get a token.
            positions: (N,) int64, the position that each token will have.

        Returns:
            What changes the step's logits, after its `start`; None if nothing does.
        """
        if not self.batch.may_change and not self._any_active():
            return None
        update = self.batch.change(rows, positions, self.token_ids)
        step = ProcessorStep(self, rows, positions, update)
        if update is not None:
            step.tell_adapters(update)
        is_used = self._any_active() and self._change(self.batch.indices(rows))
        return step if step.failures or is_used else None

    def keeps_state_of(self, row: int) -> bool:
        """Whether a processor has seen the output of a row's request, or may change its logits. It
        must not see tokens that are drafted and not sampled."""
        index = self.batch.index_of(row)
        return any(own is None or index in own for own in (each.functions for each in self.all))

    def _any_active(self) -> bool:
        """Whether a processor may change the logits of any request."""
        functions = [each.functions for each in self.all]
        return any(own is None or own for own in functions)

    def _change(self, indices: LongArray) -> bool:
        known = {index for index in indices.tolist() if index != NOT_IN_BATCH}
        return bool(known) and any(
            functions is None or not known.isdisjoint(functions)
            for functions in (each.functions for each in self.all)
        )


class ProcessorStep:
    """The logits processors in one step.

    Args:
        owner: the processors.
        rows: (N,) int64, the rows that get a token.
        positions: (N,) int64, the position that each token will have.
        update: the changes of the batch since the step before; None if there are none.

    Attributes:
        failures: by index among the N, why a request cannot go on.
    """

    def __init__(
        self,
        owner: CustomProcessors,
        rows: LongArray,
        positions: LongArray,
        update: BatchUpdate | None,
    ) -> None:
        self._owner = owner
        self._batch = owner.batch
        self._rows = rows.copy()
        self._positions = positions.copy()
        self._update = update
        self.failures: dict[int, str] = {}

    def tell_adapters(self, update: BatchUpdate) -> None:
        """Tell the adapters what changed; ends the requests for which one raises."""
        adapters = [each for each in self._owner.all if each.functions is not None]
        self._end({i: text for each in adapters for i, text in _add_each(each, update).items()})

    def start(self) -> None:
        """Bring the requests' lists of tokens up to date, now that the tokens of the step before
        are known, and tell the processors of whole batches that a step begins."""
        indices = self._batch.indices(self._rows).tolist()
        for index, position in zip(indices, self._positions.tolist(), strict=True):
            if index != NOT_IN_BATCH:
                self._batch.requests[index].read_output(self._owner.token_ids, position)
        update, self._update = self._update, None
        for each in self._owner.all:
            if each.functions is None:
                try:
                    each.processor.update_state(update)
                except Exception as problem:
                    self._end(self._blame(each, problem))

    def apply(self, logits: Tensor) -> None:
        """Apply the processors that may change which token has the largest logit.

        Args:
            logits: (N, V) float32; changed in place.
        """
        self._apply(self._owner.for_all, logits, np.arange(len(self._rows)))

    def apply_to_draws(self, logits: Tensor, samples: LongArray) -> None:
        """Apply the processors that matter to draws only.

        Args:
            logits: (M, V) float32; changed in place.
            samples: (M,) int64, the index of each row of logits among the N.
        """
        self._apply(self._owner.for_draws, logits, samples)

    def users(self) -> LongArray:
        """Return the indices among the N of the rows that a processor for draws changes."""
        indices = self._batch.indices(self._rows)
        used = np.zeros(len(indices), np.bool_)
        for each in self._owner.for_draws:
            functions = each.functions
            used |= (
                indices != NOT_IN_BATCH
                if functions is None
                else np.isin(indices, np.array(list(functions), np.int64))
            )
        return np.flatnonzero(used)

    def _apply(
        self, processors: Iterable[NamedProcessor], logits: Tensor, samples: LongArray
    ) -> None:
        for each in processors:
            with record_function(each.name):
                if each.functions is not None:
                    self._apply_functions(each, each.functions, logits, samples)
                else:
                    self._apply_to_batch(each, logits, samples)

    def _apply_functions(
        self, each: NamedProcessor, functions: dict[int, Any], logits: Tensor, samples: LongArray
    ) -> None:
        failed = {}
        for at, index in enumerate(self._batch.indices(self._rows[samples]).tolist()):
            if index in functions:
                try:
                    apply_to_row(functions[index], logits, at)
                except Exception as problem:
                    failed[index] = each.failed(problem)
        self._end(failed)

    def _apply_to_batch(self, each: NamedProcessor, logits: Tensor, samples: LongArray) -> None:
        """Apply a processor to a copy, until it raises nothing: each failure ends requests."""
        while True:
            indices = self._batch.indices(self._rows[samples])
            known = np.flatnonzero(indices != NOT_IN_BATCH)
            if not known.size:
                return
            where, places = torch.from_numpy(known), torch.from_numpy(indices[known])
            where, places = where.to(logits.device), places.to(logits.device)
            batch = logits.new_zeros((len(self._batch.requests), logits.shape[1]))
            batch[places] = logits[where]
            try:
                changed = each.processor.apply(batch)
                if changed.shape != batch.shape:
                    raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
            except Exception as problem:
                self._end(self._blame(each, problem))
            else:
                logits[where] = changed[places].to(logits.dtype)
                return

    def _blame(self, each: NamedProcessor, problem: BaseException) -> dict[int, str]:
        """Return the indices of the requests in this step that end because a processor of whole
        batches raised, with the message."""
        indices = self._batch.indices(self._rows)
        known = [index for index in indices.tolist() if index != NOT_IN_BATCH]
        passing = [index for index in known if self._batch.requests[index].params.extra_args]
        return dict.fromkeys(passing or known, each.failed(problem))

    def _end(self, failed: dict[int, str]) -> None:
        """End requests, given by their indices, and take them from the batch."""
        if not failed:
            return
        for sample, index in enumerate(self._batch.indices(self._rows).tolist()):
            if index in failed:
                self.failures[sample] = failed[index]
        self._batch.leave([self._batch.requests[index].row for index in failed])
        none: LongArray = np.zeros(0, np.int64)
        update = self._batch.change(none, none, self._owner.token_ids)
        assert update is not None, "requests have left"
        for each in self._owner.all:
            with contextlib.suppress(Exception):  # it has failed already, for these very requests
                each.processor.update_state(update)


def _add_each(each: NamedProcessor, update: BatchUpdate) -> dict[int, str]:
    """Update an adapter, one new request after the other. Returns the indices of those for which it
    raises, with the message."""
    failed = {}
    size = update.batch_size
    each.processor.update_state(BatchUpdate(size, update.removed, [], []))
    for added in update.added:
        try:
            each.processor.update_state(BatchUpdate(size, [], [added], []))
        except Exception as problem:
            failed[added[0]] = each.failed(problem)
    each.processor.update_state(BatchUpdate(size, [], [], update.moved))
    return failed
