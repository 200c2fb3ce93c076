"""Makes an engine's numbers independent of the batch, and checks that they are.

Owns the choice of what computes when `deterministic` is asked for, and the check at load: the
model itself runs a few sequences alone, and again beside each other, in chunks, in another
order and token by token. All hidden states and logits have to have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shmllm.core.plan import PADDING_BLOCK_ID, Admission, StepPlan
from shmllm.errors import EngineStartError
from shmllm.models.decoder import DecoderModel
from shmllm.models.products import MakeProduct
from shmllm.models.row_tiles import one_thread, same_bits
from shmllm.models.tiled_activation import tiled_activation
from shmllm.models.tiled_product import TiledProducts
from shmllm.sampling_params import SamplingParams
from shmllm.worker.attention import AttentionBackend
from shmllm.worker.batch import InputBatch

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (150, 70, 41, 9)
CHUNKS = (64, 50, 23, 7, 1)
"""What each sequence computes next in the second run, from any place on, over and over."""

Work = Sequence[tuple[int, int, int]]
"""(sequence, first position, number of tokens) of each request of a step."""


@torch.inference_mode()
def make_deterministic(model: DecoderModel, kinds: Sequence[MakeProduct]) -> None:
    """Let the model compute with proven numbers of rows alone.

    Args:
        model: with its weights.
        kinds: of products; the first one that holds is used.

    Raises:
        EngineStartError: this machine has none, or not for this dtype.
    """
    if model.dtype not in DTYPES:
        name = str(model.dtype).removeprefix("torch.")
        raise EngineStartError(f"deterministic=True takes float32 or bfloat16, not {name}")
    model.use_products(TiledProducts(kinds))
    model.use_activation(tiled_activation(model.config.intermediate_size, model.dtype))
    model.derive()


@torch.inference_mode()
def check_bits(
    model: DecoderModel, attention: AttentionBackend, lengths: Sequence[int], block_size: int
) -> None:
    """Run sequences alone and together, and compare all numbers.

    Args:
        model: to be checked.
        attention: with a cache that nobody uses yet; what this writes stays in it.
        lengths: of the sequences, from `fitting_lengths`.
        block_size: of the cache.

    Raises:
        EngineStartError: a number depends on the batch.
    """
    if not Rehearsal(model, attention, lengths, block_size).agrees():
        raise EngineStartError(
            "deterministic=True cannot be held on this machine: the model's numbers for a "
            "sequence alone are not those of the same sequence beside others"
        )


def fitting_lengths(
    num_rows: int, num_blocks: int, block_size: int, max_model_len: int
) -> list[int]:
    """Of LENGTHS, what fits into the rows and blocks of an engine at once."""
    found = []
    for length in LENGTHS[:num_rows]:
        shorter = min(length, max_model_len, num_blocks * block_size)
        if shorter:
            found.append(shorter)
            num_blocks -= -(-shorter // block_size)
    return found


class Rehearsal:
    """Runs sequences of random tokens through a model, without scheduler and sampler.

    Args:
        model: to be run.
        attention: with a cache that nobody uses yet.
        lengths: of the sequences; together they have to fit into the cache.
        block_size: of the cache.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        lengths: Sequence[int],
        block_size: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        rng = np.random.default_rng(5)
        self._sequences = [rng.integers(model.config.vocab_size, size=n) for n in lengths]
        self._blocks: list[list[int]] = []
        next_block = PADDING_BLOCK_ID + 1
        for length in lengths:
            end = next_block - (-length // block_size)
            self._blocks.append(list(range(next_block, end)))
            next_block = end

    def agrees(self) -> bool:
        """Whether batch, order, chunks and threads leave every bit as it is."""
        count = len(self._sequences)
        alone = [((index, 0, len(self._sequences[index])),) for index in range(count)]
        with one_thread():
            expected = self._run(alone)
        return same_bits(self._run(self._chunked()), expected)

    def _chunked(self) -> list[Work]:
        """All sequences at once, last first, each in chunks of its own."""
        done = [0] * len(self._sequences)
        steps: list[Work] = []
        while any(n < len(s) for n, s in zip(done, self._sequences, strict=True)):
            work = []
            for index in reversed(range(len(done))):
                left = len(self._sequences[index]) - done[index]
                if left:
                    size = min(CHUNKS[(len(steps) + index) % len(CHUNKS)], left)
                    work.append((index, done[index], size))
                    done[index] += size
            steps.append(work)
        return steps

    def _run(self, steps: Sequence[Work]) -> torch.Tensor:
        """Hidden states of all positions, then logits of the last ones."""
        longest = max(len(sequence) for sequence in self._sequences)
        vocab_size = self._model.config.vocab_size
        batch = InputBatch(len(self._sequences), longest, self._block_size, vocab_size)
        states: dict[tuple[int, int], torch.Tensor] = {}
        logits: dict[int, torch.Tensor] = {}
        for work in steps:
            plan = self._plan(work)
            batch.update(plan)
            inputs = batch.inputs(plan)
            self._attention.begin_step(inputs, batch)
            token_ids = torch.from_numpy(inputs.token_ids)
            positions = torch.from_numpy(inputs.positions)
            hidden = self._model.forward(token_ids, positions, self._attention)
            ends = torch.from_numpy(inputs.first_tokens + inputs.counts - 1)
            scores = self._model.compute_logits(hidden[ends])
            for place, (index, start, count) in enumerate(work):
                first = int(inputs.first_tokens[place])
                states |= {(index, start + n): hidden[first + n] for n in range(count)}
                logits[index] = scores[place]
        parts = [states[place].float() for place in sorted(states)]
        return torch.cat(parts + [logits[index] for index in sorted(logits)])

    def _plan(self, work: Work) -> StepPlan:
        """A step; sequences that begin with it are admitted."""
        plan = StepPlan(step=0, num_tokens=sum(count for _, _, count in work))
        for index, start, count in work:
            plan.rows.append(index)
            plan.starts.append(start)
            plan.counts.append(count)
            if start == 0:
                ids, blocks = self._sequences[index].tolist(), self._blocks[index]
                params = SamplingParams(temperature=0)
                plan.admissions.append(Admission(index, ids, blocks, params, 0, 0, ()))
        return plan
