"""What the scheduler tells the runner to do in one step, and what comes back.

A running request sits in a row, an index below max_num_seqs that is its own from
admission until it ends or is preempted. The runner keeps per-row state (tokens, block
table, sampling) and needs only what changed: admissions and appended blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmllm.core.request import Request
    from shmllm.sampling_params import SamplingParams

PADDING_BLOCK_ID = 0
"""The block that pads block tables; no request ever holds it."""


@dataclass(slots=True)
class Admission:
    """A request that enters a row: new, or preempted earlier and back.

    Attributes:
        token_ids: all tokens known so far: prompt, then output.
        seed: of its random draws; the draw of a token depends on (seed, position) alone.
        min_position: positions below this may not hold a token of `forbidden_ids`.
        forbidden_ids: the tokens that would end the request.
    """

    row: int
    token_ids: Sequence[int]
    block_ids: list[int]
    params: SamplingParams
    seed: int
    min_position: int
    forbidden_ids: Sequence[int]


@dataclass(slots=True)
class BlockAppend:
    """Blocks appended to a row's block table from index `first` on."""

    row: int
    first: int
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step. The columns `requests`, `rows`, `starts`, `counts` belong together.

    Attributes:
        rows: the row of each scheduled request.
        starts: position of its first token in this step.
        counts: how many tokens of it this step computes, from `starts` on.
        samples: indices into the columns of the requests that get a new token: those whose
            last known token is among the computed ones.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """The sampled tokens, one for each entry of the plan's `samples`, in that order."""

    token_ids: list[int]
