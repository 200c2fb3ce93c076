"""The state of the running requests as arrays with one row per request, and the inputs of a step.

The scheduler assigns the rows. The arrays are numpy's, because all of this is integer work on
small arrays; the runner converts a step's inputs to tensors once per step.

A GPU samples ahead of the host: when the host prepares a step, the tokens of the step before may
be known on the device only. The step's inputs then name the row whose last token is meant, and the
host stores the tokens when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.models.rope_config import UNTIMED, VideoTimes
from shmllm.models.vision.canvas import CanvasMarks
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.outputs.sampling_masks import SamplingMasks
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.canvas_positions import CanvasPositions
from shmllm.worker.grid_positions import GridPositions
from shmllm.worker.item_places import item_ends
from shmllm.worker.logits_processors import LogitsState, needs_logits_processors
from shmllm.worker.rope_positions import PlacedGrid, PlacedPositions, RopePositions
from shmllm.worker.step_inputs import StepInputs

NO_ROWS: LongArray = np.zeros(0, np.int64)
Alternatives = int | LongArray
"""The alternatives to a row's own token whose log-probabilities it asks for: the number of most
likely tokens, -1 for the whole vocabulary, or the token ids of `logprob_token_ids`."""
NEVER = 2**31
"""A position that no request reaches."""
EMBEDDED = -1
"""The token id of a token whose embedding a prompt has given."""
SAMPLED_FOR_ROW = -2
"""The token id `SAMPLED_FOR_ROW - row` stands for the token that was sampled last for `row`."""


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens of a step.

    Attributes:
        token_ids: (N,) int64, one for each sampled row.
        logprobs: the log-probabilities of the rows that ask for them, in their order; None if no
            row asks.
        failures: by index among the N, why a request cannot go on.
        sampling_masks: of the N, the tokens among which each was drawn, those of greedy rows
            without a meaning; None if nobody asks for them.
    """

    token_ids: LongArray
    logprobs: TokenLogprobs | None
    failures: Mapping[int, str] = field(default_factory=dict)
    sampling_masks: SamplingMasks | None = None


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """The places of N tokens that a step samples, for `InputBatch.fill`.

    Attributes:
        rows: (N,) int64, the rows of the tokens.
        positions: (N,) int64, their positions.
        num_assigned: (N,) int64, how many requests had been assigned to each row at that step.
    """

    rows: LongArray
    positions: LongArray
    num_assigned: LongArray


class StepTables(Protocol):
    """What a program reads of the running requests in every step; see `InputBatch`."""

    block_tables: IntArray
    max_samples: int


class InputBatch:
    """The tokens, block table and sampling parameters of the running requests.

    Args:
        num_rows: the largest number of requests that run at once.
        max_model_len: the largest number of tokens of a request.
        block_size: tokens in a KV block.
        vocab_size: entries in a row of logits.
        num_groups: the number G of groups of layers, which have a block table each.
        samples_ahead: whether the inputs of a step may be made before the tokens of the step
            before are appended.
        max_drafts: the largest number of drafted tokens in a step.
        make_tables: returns the memory of `block_tables`, zeroed, by their shape; None: any.
        patches_per_side: how many patches of an image an embedding stands for in each direction, in
            models that rotate by positions on several axes; 0: others.
        grid_axes: the number of axes of `GridPositions`; 0: those of `RopePositions`.
        canvas: the marks of `CanvasPositions`; None: the model has other positions.
        video_times: where frames of videos are on the axis of time.
        spans_prompts: whether a token of a prompt attends to all of the prompt.
        has_encoder: whether requests begin with positions that an encoder computes.

    Attributes:
        max_samples: the largest number of tokens at which a step samples.
        token_ids: (num_rows, max_model_len + 1) int32, the tokens of each row's request.
        block_tables: (G, num_rows, blocks) int32, the block ids of each row's request.
        temperature, top_p, min_p: (num_rows,) float32, sampling parameters; greedy rows have
            temperature 0.
        top_k: (num_rows,) int32.
        seeds: (num_rows,) uint64.
        num_prompt_tokens: (num_rows,) int64, the length of each row's prompt, if its tokens attend
            to all of it, or None.
        rope_positions: the positions on axes of the requests; None: the model has no axes.
        logits_states: by row, the state of the logits processors; most rows need none.
        logprobs: by row, the alternatives, for rows that ask for log-probabilities.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        *,
        samples_ahead: bool = False,
        max_drafts: int = 0,
        make_tables: Callable[[tuple[int, int, int]], IntArray] | None = None,
        patches_per_side: int = 0,
        grid_axes: int = 0,
        canvas: CanvasMarks | None = None,
        video_times: VideoTimes = UNTIMED,
        spans_prompts: bool = False,
        has_encoder: bool = False,
    ) -> None:
        self.block_size = block_size
        self.max_samples = num_rows + max_drafts
        self._has_drafts = max_drafts > 0
        self._vocab_size = vocab_size
        max_blocks = -(-max_model_len // block_size)
        # One column more than max_model_len, for the token sampled at the last position.
        self.token_ids: IntArray = np.zeros((num_rows, max_model_len + 1), np.int32)
        shape = num_groups, num_rows, max_blocks
        self.block_tables: IntArray
        self.block_tables = make_tables(shape) if make_tables else np.zeros(shape, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seeds = np.zeros(num_rows, np.uint64)
        self._second_segments = np.full(num_rows, NEVER, np.int64)
        self._patches_per_side = patches_per_side
        self._video_times = video_times
        self.num_prompt_tokens = np.zeros(num_rows, np.int64) if spans_prompts else None
        self._encoded_ends = np.zeros(num_rows, np.int64) if has_encoder else None
        self.rope_positions: PlacedPositions | GridPositions | None = None
        if canvas is not None:
            self.rope_positions = CanvasPositions(num_rows, canvas)
        elif patches_per_side:
            self.rope_positions = GridPositions(grid_axes) if grid_axes else RopePositions(num_rows)
        self._samples_ahead = samples_ahead
        self._num_known = np.zeros(num_rows, np.int64)
        self._num_assigned = np.zeros(num_rows, np.int64)
        self._ones = np.ones(num_rows, np.int64)
        self._indices = np.arange(num_rows)
        self.logits_states: dict[int, LogitsState] = {}
        self.logprobs: dict[int, Alternatives] = {}
        self._inputs: StepInputs | None = None
        self._sampled: LongArray = NO_ROWS

    def update(self, plan: StepPlan) -> None:
        """Add the new requests, the drafted tokens and the appended blocks of a step."""
        for request in plan.new_requests:
            self._add_request(request)
        for index, drafts in plan.drafts.items():
            end = plan.starts[index] + plan.counts[index]
            self.token_ids[plan.rows[index], end - len(drafts) : end] = drafts
        for append in plan.block_appends:
            for group, first in enumerate(append.firsts):
                self._put_blocks(group, append.row, first, append.block_ids[group])

    def _put_blocks(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> None:
        self.block_tables[group, row, first : first + len(block_ids)] = block_ids

    def _add_request(self, request: NewRequest) -> None:
        row, params = request.row, request.params
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        for group, block_ids in enumerate(request.block_ids):
            self._put_blocks(group, row, 0, block_ids)
        self._num_known[row] = len(request.token_ids)
        self._num_assigned[row] += 1
        if self.num_prompt_tokens is not None:
            self.num_prompt_tokens[row] = request.num_prompt_tokens
        if self._encoded_ends is not None:
            self._encoded_ends[row] = request.items[0].end
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_k[row] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = request.seed % 2**64
        self._second_segments[row] = request.second_segment or NEVER
        if self.rope_positions is not None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            self.rope_positions.update(row, list(self._placed_grids(request)), prompt)
        self.logits_states.pop(row, None)
        if needs_logits_processors(params, request):
            self.logits_states[row] = LogitsState(request, self._vocab_size)
        self.logprobs.pop(row, None)
        if params.logprob_token_ids is not None:
            self.logprobs[row] = np.array(params.logprob_token_ids, np.int64)
        elif params.logprobs is not None:
            self.logprobs[row] = params.logprobs

    def _placed_grids(self, request: NewRequest) -> Iterator[PlacedGrid]:
        """Yield the images and videos of a request; each span of one has some of its frames."""
        side, times = self._patches_per_side, self._video_times
        for item in request.items:
            if item.modality in ("audio", "text"):
                continue  # whose positions are those of text
            frames, rows, columns = item.grid
            of_span = frames // len(item.spans)
            interval, factor = 1.0, 1.0
            if times.is_aligned:
                interval, factor = item.frame_seconds, times.per_second
            elif times.per_second:  # rounded as in transformers, which has times in float32
                seconds = np.float32(item.frame_seconds)
                interval = float(np.float32(times.per_second) * seconds)
            for begin, _ in item.spans:
                yield PlacedGrid(
                    *(begin, of_span, rows // side, columns // side),
                    *(interval, factor, times.is_aligned),
                )

    def is_filtered(self, rows: LongArray) -> npt.NDArray[np.bool_]:
        """Return (N,) booleans: whether top_k, top_p or min_p restricts the draws of these rows."""
        top_k = self.top_k[rows]
        cuts = (top_k > 0) & (top_k < self._vocab_size)
        has_filter = cuts | (self.top_p[rows] < 1.0) | (self.min_p[rows] > 0.0)
        return has_filter & (self.temperature[rows] > 0.0)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of a step, after `update` with the same plan. They are valid until
        the next call."""
        if plan.is_repeat and self._inputs is not None:
            self._advance(self._inputs, bool(plan.block_appends))
        else:
            self._inputs = self.gather(plan)
        return self._inputs

    def _advance(self, inputs: StepInputs, has_new_blocks: bool) -> None:
        """Change the inputs of a decode step to those of the next one with the same requests."""
        sampled = SAMPLED_FOR_ROW - inputs.rows if self._samples_ahead else self._sampled
        inputs.token_ids[:] = sampled
        inputs.positions += 1
        inputs.context_lens += 1
        inputs.sample_positions += 1
        inputs.rope_positions = self._rope_positions(inputs.rows, inputs.positions)
        inputs.item_ends = None  # a token attends to none of later steps
        if has_new_blocks or (
            # A request may enter a block that it got for drafts before.
            self._has_drafts and not (inputs.positions % self.block_size).all()
        ):
            inputs.slot_mapping[:] = self._slots(inputs.rows, inputs.positions)
        else:
            inputs.slot_mapping += 1

    def _rope_positions(self, rows: LongArray, positions: LongArray) -> LongArray | None:
        return None if self.rope_positions is None else self.rope_positions.fill(rows, positions)

    def _slots(self, rows: LongArray, positions: LongArray) -> LongArray:
        blocks = self.block_tables[:, rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def slots_of(self, row: int, first: int, end: int) -> LongArray:
        """Return (G, end - first) int64, the slots of positions of a row's request in each group of
        layers."""
        positions = np.arange(first, end)
        return self._slots(np.full(len(positions), row), positions)

    def gather(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of a step that another model computes of these requests."""
        rows = np.array(plan.rows, np.int64)
        starts = np.array(plan.starts, np.int64)
        is_decode = plan.num_tokens == len(rows)
        if is_decode:
            counts, first_tokens = self._ones[: len(rows)], self._indices[: len(rows)]
            token_rows, positions, context_lens = rows, starts, starts + 1
        else:
            counts = np.array(plan.counts, np.int64)
            first_tokens = np.cumsum(counts) - counts
            token_rows = np.repeat(rows, counts)
            positions = np.arange(plan.num_tokens) + np.repeat(starts - first_tokens, counts)
            context_lens = starts + counts
        samples = np.array(plan.samples, np.int64)
        if len(samples) == len(rows):
            samples = self._indices[: len(rows)]
        sample_rows, sample_positions = rows[samples], context_lens[samples]
        sample_tokens = samples if is_decode else (first_tokens + counts)[samples] - 1
        if plan.drafts:
            each = np.array(plan.sample_counts, np.int64)
            ends = np.cumsum(each)
            before = np.arange(ends[-1]) - np.repeat(ends - 1, each)  # -D to 0 for each request
            sample_rows = np.repeat(sample_rows, each)
            sample_positions = np.repeat(sample_positions, each) + before
            sample_tokens = np.repeat(sample_tokens, each) + before
        token_ids = self.token_ids[token_rows, positions].astype(np.int64)
        if self._samples_ahead:
            is_sampled = positions >= self._num_known[token_rows]
            token_ids = np.where(is_sampled, SAMPLED_FOR_ROW - token_rows, token_ids)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            token_types=(positions >= self._second_segments[token_rows]).astype(np.int64),
            slot_mapping=self._slots(token_rows, positions),
            rows=rows,
            first_tokens=first_tokens,
            counts=counts,
            context_lens=context_lens,
            sample_tokens=sample_tokens,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            rope_positions=self._rope_positions(token_rows, positions),
            item_ends=self._item_ends(plan, token_rows, positions, first_tokens),
            encoded_ends=None if self._encoded_ends is None else self._encoded_ends[token_rows],
        )

    def _item_ends(
        self, plan: StepPlan, rows: LongArray, positions: LongArray, first_tokens: LongArray
    ) -> LongArray | None:
        if self.num_prompt_tokens is None:
            return item_ends(plan, positions, first_tokens)
        return np.maximum(positions + 1, self.num_prompt_tokens[rows])

    def append(self, inputs: StepInputs, sampled: LongArray) -> None:
        """Append the sampled tokens of a step to its requests. Those behind a draft that was wrong
        lie behind the request's last token, where later ones take their places."""
        self._sampled = sampled
        self.token_ids[inputs.sample_rows, inputs.sample_positions] = sampled

    def expect(self, inputs: StepInputs) -> ExpectedTokens:
        """Return the places of the tokens that a step samples, for a later call of `fill`. By then
        `inputs` has changed, and the rows may belong to other requests."""
        rows = inputs.sample_rows
        return ExpectedTokens(rows, inputs.sample_positions.copy(), self._num_assigned[rows])

    def fill(self, expected: ExpectedTokens, sampled: LongArray) -> None:
        """Store sampled tokens, except those of rows that belong to other requests by now."""
        self._sampled = sampled
        rows, positions = expected.rows, expected.positions
        is_same = self._num_assigned[rows] == expected.num_assigned
        if not is_same.all():
            rows, positions, sampled = rows[is_same], positions[is_same], sampled[is_same]
        self.token_ids[rows, positions] = sampled
