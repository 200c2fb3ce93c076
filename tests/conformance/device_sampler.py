"""The tests of the sampler on a device.

Greedy rows equal those of the CPU's sampler with the same requests and logits. Drawn rows equal
those of the kernels' reference, since the device's noise differs from the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conformance.device import no_waits

from shmllm.config.graphs import CudaGraphMode
from shmllm.core.plan import NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.params.thinking import ThinkingBudget
from shmllm.worker.batch import NO_ROWS, InputBatch
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.sampler import GpuSampler
from shmllm.worker.grammar_masks import PendingMasks
from shmllm.worker.logits_processors import apply_logits_processors
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.reference import sampling as plain
from shmllm_kernels.reference.sampling import SamplingColumns

NUM_ROWS = 8
VOCAB_SIZE = 300
MAX_LEN = 64
PADDING = 3
PROMPT = [1, 2, 2, 8]
STOP_IDS = (5, 6)
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

PROCESSORS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "allowed ids": {"allowed_token_ids": [0, 3, 5, 31, 32, 63, 64, 200, 299]},
    "bias": {"logit_bias": {2: 9.5, 7: -100, 22: float("-inf"), 290: 8.0}},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.7},
    "penalties": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.6,
    },
    "min_tokens": {"min_tokens": 6},
    "bad words": {"bad_words": [[4], [9]]},
    "longer bad words": {"bad_words": [[4], [9, 17], [17, 9, 30], [600, 2], [8, 40]]},
    "trace": {
        "trace_decode_token_ids": [7, 299, 0, 7, 31, 5, 2, 64, 9],
        "allowed_token_ids": [1],
        "logit_bias": {3: 100},
        "repetition_penalty": 1.7,
        "min_tokens": 6,
        "bad_words": [[7]],
    },
    "thinking": {"thinking": ThinkingBudget(2, (2, 8), (40, 3), (40, 3))},
    "everything": {
        "allowed_token_ids": [*range(0, 300, 2), 9, 5],
        "logit_bias": {10: 2.0, 30: -1.0, 9: 5.5},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.9,
        "min_tokens": 6,
        "bad_words": [[12], [9, 2]],
    },
}
DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
]


def new_request(row: int, output: Any = (), prompt: Any = PROMPT, **options: Any) -> NewRequest:
    """Make a greedy request, unless `options` has a temperature. Its bad words are token ids."""
    words = tuple(map(tuple, options.pop("bad_words", ())))
    thinking = options.pop("thinking", None)
    seed = options.pop("seed", 1000 + row)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 50} | options)
    return NewRequest(
        row=row,
        token_ids=[*prompt, *output],
        block_ids=[[1]],
        params=params,
        seed=seed,
        min_position=len(prompt) + params.min_tokens,
        forbidden_ids=STOP_IDS if params.min_tokens else (),
        num_prompt_tokens=len(prompt),
        bad_words=words,
        thinking=thinking,
    )


def sampled_inputs(rows: Any, positions: Any, tokens: Any = ()) -> StepInputs:
    """Make the inputs of a step that computes the tokens before the sampled ones and no others."""
    rows, positions, tokens = (np.array(each, np.int64) for each in (rows, positions, tokens))
    return StepInputs(tokens, *[NO_ROWS] * 7, np.arange(len(rows)), rows, positions)


def grammar_masks(rows: list[int], words: np.ndarray) -> PendingMasks:
    future: Future[Any] = Future()
    future.set_result(words)
    return PendingMasks(rows, future)


class Request:
    """A request, with the tokens of all steps so far."""

    def __init__(self, new: NewRequest) -> None:
        self.row = new.row
        self.new = new
        self.token_ids = list(new.token_ids)

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def resumed(self) -> NewRequest:
        """Return the request as it is resumed after preemption."""
        old = self.new
        names = ("params", "seed", "min_position", "forbidden_ids", "num_prompt_tokens")
        kept = {name: getattr(old, name) for name in (*names, "bad_words", "thinking")}
        return NewRequest(row=old.row, token_ids=list(self.token_ids), block_ids=[[1]], **kept)


class Pair:
    """The samplers of the CPU and of the device, with the same requests.

    The device's batch gets the tokens of an output only if its sampler needs them.
    """

    def __init__(
        self,
        device,
        mode="raw_logprobs",
        vocab_size=VOCAB_SIZE,
        max_drafts=0,
        returns_masks=False,
    ) -> None:
        self.device, self.vocab_size = device, vocab_size
        self.batches = [
            InputBatch(NUM_ROWS, MAX_LEN, 8, vocab_size, max_drafts=max_drafts) for _ in range(2)
        ]
        self.cpu = CpuSampler(self.batches[0], mode, returns_masks=returns_masks)
        self.gpu = GpuSampler(
            self.batches[1], NUM_ROWS, vocab_size, device, mode, returns_masks=returns_masks
        )
        self.random = np.random.default_rng(7)
        self.requests: dict[int, Request] = {}

    def add(self, *new_requests: NewRequest) -> None:
        plan = StepPlan(step=0, new_requests=list(new_requests))
        for batch in self.batches:
            batch.update(plan)
        with no_waits(self.device):
            self.gpu.update(plan)
        self.requests |= {each.row: Request(each) for each in new_requests}

    def noise(self, num_rows: int) -> torch.Tensor:
        values = self.random.normal(0, 3, (num_rows, self.vocab_size))
        return torch.tensor(values, dtype=torch.float32)

    def coarse_noise(self, num_rows: int) -> torch.Tensor:
        """Return logits in half precision of which no two in a row are equal."""
        values = [self.random.permutation(self.vocab_size) * 0.03 - 4 for _ in range(num_rows)]
        return torch.tensor(np.array(values), dtype=torch.float16)

    def submit(self, logits, rows, masks=None, is_repeat=False, positions=None):
        """Launch the device's sampling of a step, with padding after its rows."""
        plan = StepPlan(step=0, rows=list(rows), samples=list(range(len(rows))))
        plan.is_repeat = is_repeat
        if masks is not None:
            plan.constraints = [(index, None) for index in masks.rows]
        if positions is None:
            positions = [self.requests[row].position for row in rows]
        inputs = sampled_inputs(rows, positions)
        if self.gpu.needs_tokens(plan, inputs):
            for row in rows:
                request = self.requests[row]
                self.batches[1].token_ids[row, : request.position] = request.token_ids
        return self.launch(logits, inputs, plan, masks)

    def launch(self, logits, inputs, plan, masks=None):
        """Launch the device's sampling, whose tokens are in the batch if it needs them."""
        rows, positions = inputs.sample_rows, inputs.sample_positions
        on = self.device.torch_device
        padded = torch.full((PADDING, self.vocab_size), torch.nan, dtype=logits.dtype)
        device_inputs = SimpleNamespace(
            sample_rows=torch.tensor([*rows.tolist(), *[-1] * PADDING], dtype=torch.int32).to(on),
            sample_positions=torch.tensor([*positions.tolist(), *[0] * PADDING]).to(on),
            num_padded=len(rows) + PADDING,
        )
        logits = torch.cat([logits, padded]).to(on)
        with no_waits(self.device):
            return self.gpu(logits, inputs, device_inputs, plan, masks)

    def expected(self, logits, rows, masks=None):
        for row in rows:
            request = self.requests[row]
            self.batches[0].token_ids[row, : request.position] = request.token_ids
        positions = np.array([self.requests[row].position for row in rows])
        return self.cpu(logits.float().clone(), np.array(rows), positions, masks)

    def step(self, rows, logits=None, masks=None, is_repeat=False):
        """Sample a step with both samplers, append the device's tokens, and return both results."""
        logits = self.noise(len(rows)) if logits is None else logits
        want = self.expected(logits, rows, masks)
        got = self.submit(logits, rows, masks, is_repeat).result()
        assert got.token_ids.dtype == np.int64
        self.append(rows, got.token_ids)
        return got, want

    def append(self, rows, token_ids) -> None:
        for row, token in zip(rows, token_ids.tolist(), strict=True):
            self.requests[row].token_ids.append(token)

    def check(self, rows, **options) -> list[int]:
        """Check that both samplers give the same tokens in a step of greedy rows."""
        got, want = self.step(rows, **options)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        last = self.gpu.last_tokens.tolist()
        assert [last[row] for row in rows] == got.token_ids.tolist()
        return got.token_ids.tolist()

    def processed(self, logits, rows, masks=None) -> torch.Tensor:
        """Return the logits after the CPU's logits processors."""
        logits = logits.float().clone()
        if masks is not None:
            masks(logits)
        batch = InputBatch(NUM_ROWS, MAX_LEN, 8, self.vocab_size)
        batch.update(StepPlan(step=0, new_requests=[self.requests[row].resumed() for row in rows]))
        states = [
            (i, batch.logits_states[row])
            for i, row in enumerate(rows)
            if row in batch.logits_states
        ]
        if states:
            ids = [batch.token_ids[rows[i], : self.requests[rows[i]].position] for i, _ in states]
            apply_logits_processors(logits, states, ids)
        return logits

    def columns(self, rows) -> SamplingColumns:
        """Return the sampling parameters of drawn rows."""
        columns = SamplingColumns.greedy(len(rows), "cpu")
        for index, row in enumerate(rows):
            params = self.requests[row].new.params
            for name in ("temperature", "top_k", "top_p", "min_p"):
                getattr(columns, name)[index] = getattr(params, name)
            seed = np.uint64(self.requests[row].new.seed).astype(np.int64)
            columns.seeds[index] = int(seed)
        return columns


def random_words(random, count, num_tokens, width=None) -> np.ndarray:
    """Return the masks of a tokenizer with `num_tokens` tokens. They allow about a tenth of the
    tokens, and always the end token."""
    width = width or -(-num_tokens // 32)
    bits = random.random((count, width * 32)) < 0.1
    bits[:, num_tokens:] = False
    bits[:, :16:5] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@contextlib.contextmanager
def replays_of(sampler: GpuSampler) -> Iterator[list[bool]]:
    """Note for each step that may have a graph whether it was replayed."""
    found: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        replay = sampler._graphs.replay
        patch.setattr(
            sampler._graphs, "replay", lambda *step: found.append(replay(*step)) or found[-1]
        )
        yield found


class SamplerConformance:
    @pytest.mark.parametrize("name", PROCESSORS)
    def test_a_logits_processor_gives_the_tokens_of_the_cpu(self, gpu_device, name):
        """The row is alone, beside a row without processors, or begins with output tokens."""
        pair = Pair(gpu_device)
        pair.add(
            new_request(3, **PROCESSORS[name]),
            new_request(0),
            new_request(6, [9, 9, 17], **PROCESSORS[name]),
        )
        for step in range(4):
            pair.check([6, 3, 0], is_repeat=step > 0)
        pair.check([3])

    @pytest.mark.parametrize("seed", range(8))
    def test_random_batches_give_the_tokens_of_the_cpu(self, gpu_device, seed):
        """Requests start, are skipped and are resumed in any order; some have a grammar, too."""
        pair = Pair(gpu_device)
        pair.random = random = np.random.default_rng(seed)
        names = list(PROCESSORS)
        for _ in range(5):
            entering = random.permutation(NUM_ROWS)[: random.integers(0, 4)].tolist()
            chosen = [PROCESSORS[names[random.integers(len(names))]] for _ in entering]
            pair.add(
                *(
                    new_request(row, random.integers(0, 40, random.integers(5)), **options)
                    for row, options in zip(entering, chosen, strict=True)
                )
            )
            rows = random.permutation(sorted(pair.requests)).tolist()[: random.integers(1, 5)]
            if not rows:
                continue
            masks = None
            if random.random() < 0.4:
                few = sorted(random.permutation(len(rows))[: random.integers(1, 3)].tolist())
                masks = grammar_masks(few, random_words(random, len(few), 290))
            pair.check(rows, masks=masks)

    @pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE - 3])
    def test_masks_are_those_of_the_cpu(self, gpu_device, vocab_size):
        """Greedy rows have none; a row may have log-probabilities, a grammar or no filters, too."""
        pair = Pair(gpu_device, "processed_logprobs", vocab_size, returns_masks=True)
        drawn = {"temperature": 0.8, "seed": 4}
        pair.add(
            new_request(5, top_k=7, **drawn),
            new_request(0),
            new_request(3, top_k=40, top_p=0.6, logprobs=3, **drawn),
            new_request(1, min_p=0.2, allowed_token_ids=[3, 8, 250], **drawn),
            new_request(2, **drawn),
        )
        rows = [3, 0, 5, 2, 1]
        masks = grammar_masks([2], random_words(pair.random, 1, vocab_size))
        for grammar in (None, masks):
            got, want = (each.sampling_masks for each in pair.step(rows, masks=grammar))
            assert got.words.tolist() == want.words.tolist()
            assert got.begins.tolist() == want.begins.tolist()
        counts = got.words[got.begins[:-1]].tolist()
        assert [counts[1], counts[3]] == [0, vocab_size]
        assert all(0 < counts[i] <= most for i, most in ((2, 7), (0, 39), (4, 3)))

    def test_graphs_give_the_tokens_of_launches(self, gpu_device):
        """Steps of one to four rows, padded to the next captured size. A step with a filtered row,
        and one whose logits lie elsewhere, launch their sampling."""
        launched, captured = Pair(gpu_device), Pair(gpu_device)
        requests = [
            new_request(4),
            new_request(1, seed=5, temperature=1.0),
            new_request(0, seed=2**63 + 1, temperature=0.7),
            new_request(2, seed=8, temperature=1.0, top_k=5),
        ]
        for pair in (launched, captured):
            pair.add(*requests)
        on, sizes = gpu_device.torch_device, (4, 2, 1)
        logits = torch.zeros(max(sizes), VOCAB_SIZE).to(on)
        step = SimpleNamespace(
            sample_rows=torch.full((max(sizes),), -1, dtype=torch.int32).to(on),
            sample_positions=torch.zeros(max(sizes), dtype=torch.int64).to(on),
            num_padded=0,
        )
        captures = [(CudaGraphMode.FULL, BatchDescriptor(size, size, True)) for size in sizes]
        report = captured.gpu.capture(gpu_device, captures, logits, step)
        assert report.num_graphs == len(sizes)
        for rows in ([4, 1, 0], [1], [0, 4], [4, 2], [4, 1, 0]):
            values = launched.noise(len(rows))
            want = launched.submit(values, rows).result().token_ids.tolist()
            step.num_padded = min(size for size in sizes if size >= len(rows))
            step.sample_rows[:] = -1
            step.sample_rows[: len(rows)] = torch.tensor(rows, dtype=torch.int32).to(on)
            positions = [captured.requests[row].position for row in rows]
            step.sample_positions[: len(rows)] = torch.tensor(positions).to(on)
            for where, is_replayed in ((logits, True), (logits.clone(), False)):
                where[: len(rows)] = values.to(on)
                plan = StepPlan(step=0, rows=list(rows), samples=list(range(len(rows))))
                with replays_of(captured.gpu) as found:
                    pending = captured.gpu(where, sampled_inputs(rows, positions), step, plan)
                assert found == ([] if 2 in rows else [is_replayed])
                assert pending.result().token_ids.tolist() == want
            for pair in (launched, captured):
                pair.append(rows, np.array(want))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_biases_are_finer_than_half_precision_logits(self, gpu_device, dtype):
        if dtype is torch.bfloat16 and gpu_device.torch_device.type == "cpu":
            pytest.skip("the interpreter's bfloat16 is broken")
        pair = Pair(gpu_device)
        pair.add(new_request(1, logit_bias={7: 0.001, 250: 0.002}), new_request(2), new_request(3))
        logits = torch.zeros(3, VOCAB_SIZE, dtype=dtype)
        logits[:, [7, 40, 250]] = 12.0
        assert pair.check([1, 2, 3], logits=logits) == [250, 7, 7]

    @pytest.mark.parametrize("num_tokens", [200, 256, 300, 400])
    def test_the_tokenizers_vocabulary_may_differ_from_the_models(self, gpu_device, num_tokens):
        pair = Pair(gpu_device)
        allowed = [3, 10, 199, 299]
        pair.add(new_request(0), new_request(1, allowed_token_ids=allowed), new_request(2))
        words = random_words(pair.random, 2, num_tokens)
        before = words.copy()
        for _ in range(3):
            tokens = pair.check([2, 1, 0], masks=grammar_masks([0, 1], words))
            assert tokens[1] in allowed
        assert np.array_equal(words, before)
        pair.add(new_request(2), new_request(1))
        free = pair.noise(2)
        free[:, 299] = 50.0
        assert pair.check([2, 1], logits=free) == [299, 299]

    def test_drawn_rows_give_the_references_tokens(self, gpu_device):
        pair = Pair(gpu_device)
        rows = [4, 0, 5, 1, 3, 2]
        pair.add(
            *(
                new_request(row, seed=2**63 + 5 + row, **options)
                for row, options in zip(rows, DRAWN, strict=True)
            )
        )
        seen = []
        for step in range(3):
            logits = pair.noise(len(rows))
            positions = torch.tensor([pair.requests[row].position for row in rows])
            want = plain.sample(logits, positions, pair.columns(rows))
            got, _ = pair.step(rows, logits=logits, is_repeat=step > 0)
            assert got.token_ids.tolist() == want.tolist()
            seen += got.token_ids.tolist()
        assert len(set(seen)) > 6

    def test_logits_processors_apply_to_drawn_rows(self, gpu_device):
        pair = Pair(gpu_device)
        rows = [4, 0, 5, 1]
        names = ("everything", "penalties", "bias", "longer bad words")
        pair.add(
            *(
                new_request(row, [9, 17, 9], **PROCESSORS[name] | drawn)
                for row, name, drawn in zip(rows, names, DRAWN[1:5], strict=True)
            )
        )
        masks = grammar_masks([1], random_words(pair.random, 1, VOCAB_SIZE))
        for step in range(3):
            logits = pair.noise(len(rows))
            positions = torch.tensor([pair.requests[row].position for row in rows])
            processed = pair.processed(logits, rows, masks)
            want = plain.sample(processed, positions, pair.columns(rows))
            got, _ = pair.step(rows, logits=logits, masks=masks, is_repeat=step > 0)
            assert got.token_ids.tolist() == want.tolist()

    @pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
    def test_a_trace_is_followed_whatever_the_temperature(self, gpu_device, mode):
        pair, trace = Pair(gpu_device, mode), [17, 17, 299, 0]
        # Processed, all other tokens have the same score.
        options = {"trace_decode_token_ids": trace, "logprobs": 2 * mode.startswith("raw")}
        pair.add(*(new_request(row, **each, **options) for row, each in enumerate(DRAWN)))
        rows = list(range(len(DRAWN)))
        for step, token in enumerate([*trace, trace[-1]]):
            logits = pair.noise(len(rows))
            got, want = pair.step(rows, logits=logits, is_repeat=step > 0)
            assert got.token_ids.tolist() == want.token_ids.tolist() == [token] * len(rows)
            assert_same_scores(got.logprobs, want.logprobs)
            if mode.startswith("raw"):
                expected = logits.double().log_softmax(dim=1)[:, token].numpy()
                assert got.logprobs.logprobs == pytest.approx(expected, abs=1e-5)

    def test_a_preempted_request_continues_as_before(self, gpu_device):
        """The request is resumed in another row, and its former row has none of its state."""
        options = {**PROCESSORS["everything"], "min_tokens": 9}
        pair = Pair(gpu_device)
        pair.add(new_request(1, **options), new_request(2, **PROCESSORS["penalties"]))
        for _ in range(3):
            pair.check([1, 2])
        back = pair.requests[1].resumed()
        back.row = 5
        pair.add(back, new_request(1, presence_penalty=2.0))
        for _ in range(3):
            pair.check([5, 1, 2])

    def test_the_tokens_of_new_requests_are_counted_in_pieces(self, gpu_device):
        pair = Pair(gpu_device)
        pair.gpu._token_counts.tokens_at_once = 3
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[:, [9, 17, 30, 40]] = torch.tensor([3.0, 2.5, 2.0, 1.5])
        options = {"repetition_penalty": 2.5, "frequency_penalty": 0.4}
        pair.add(
            new_request(2, [17, 9, 9, 40], prompt=[9, 17, 5, 30], **options),
            new_request(5, prompt=[30, 17, 9, 9, 1, 2, 3], **options),
        )
        assert pair.check([2, 5], logits=logits) == [30, 40]

    def test_a_new_request_in_a_row_has_none_of_the_old_state(self, gpu_device):
        pair = Pair(gpu_device)
        everything = {**PROCESSORS["everything"], "temperature": 1.0, "top_k": 3, "logprobs": 2}
        pair.add(new_request(1, [9, 12], **everything), new_request(2, **PROCESSORS["penalties"]))
        masks = grammar_masks([0], random_words(pair.random, 1, VOCAB_SIZE))
        pair.step([1, 2], masks=masks)
        pair.add(new_request(1))
        logits = pair.noise(2)
        got, _ = pair.step([1, 2], logits=logits)
        assert got.token_ids[0] == logits[0].argmax()
        assert got.logprobs is None
        words = np.full((1, 10), -1, np.int32)
        words[0, 0] &= ~1
        logits[0, 51], logits[0, 0] = 40.0, 50.0
        got, _ = pair.step([1, 2], logits=logits, masks=grammar_masks([0], words))
        assert got.token_ids[0] == 51
        pair.add(new_request(1, presence_penalty=1.0))
        pair.check([1, 2])

    def test_min_tokens_end_within_repeated_steps(self, gpu_device):
        pair = Pair(gpu_device)
        pair.add(new_request(0, min_tokens=2), new_request(3, [9], min_tokens=4), new_request(5))
        logits = pair.noise(3)
        logits[:, STOP_IDS] = 30.0
        tokens = [pair.check([0, 3, 5], logits=logits, is_repeat=step > 0) for step in range(5)]
        stops = [[token in STOP_IDS for token in each] for each in tokens]
        assert [each[0] for each in stops] == [False, False, True, True, True]
        assert [each[1] for each in stops] == [False, False, False, True, True]
        assert all(each[2] for each in stops)

    def test_only_bad_words_of_several_tokens_and_grammars_wait_for_tokens(self, gpu_device):
        pair = Pair(gpu_device)
        pair.add(*(new_request(row, **PROCESSORS[n]) for row, n in enumerate(list(PROCESSORS)[:8])))
        plan = StepPlan(step=0, rows=list(range(8)), samples=list(range(8)))
        inputs = sampled_inputs(range(8), [5] * 8)
        assert not pair.gpu.needs_tokens(plan, inputs)
        plan.constraints = [(0, None)]
        assert pair.gpu.needs_tokens(plan, inputs)
        plan.constraints = []
        pair.add(new_request(4, **PROCESSORS["bad words"]))
        assert not pair.gpu.needs_tokens(plan, inputs)
        pair.add(new_request(4, **PROCESSORS["longer bad words"]))
        assert pair.gpu.needs_tokens(plan, inputs)
        plan.samples = [1, 2]
        assert not pair.gpu.needs_tokens(plan, sampled_inputs([1, 2], [5] * 2))
        pair.add(new_request(4))
        plan.samples = list(range(8))
        assert not pair.gpu.needs_tokens(plan, inputs)

    def test_two_steps_may_be_in_flight(self, gpu_device):
        """The second step, with penalties, is launched before the first step's result is read."""
        pair = Pair(gpu_device)
        rows = [2, 0, 7]
        pair.add(
            new_request(2, frequency_penalty=2.0, logprobs=2),
            new_request(0),
            new_request(7, logprobs=3),
        )
        noise = [pair.noise(3) * 0.1 for _ in range(4)]
        for logits in noise:
            logits[0, 20:24] = torch.tensor([8.0, 7.5, 7.0, 6.5])
        in_flight = []
        results = []
        for step, logits in enumerate(noise):
            positions = [len(PROMPT) + step] * 3
            in_flight.append(pair.submit(logits, rows, positions=positions, is_repeat=step > 0))
            if step:
                results.append(in_flight.pop(0).result())
        results.append(in_flight.pop(0).result())
        for logits, got in zip(noise, results, strict=True):
            want = pair.expected(logits, rows)
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert_same_scores(got.logprobs, want.logprobs)
            pair.append(rows, got.token_ids)
        assert [int(got.token_ids[0]) for got in results] == [20, 21, 22, 23]

    def test_padding_is_neither_sampled_nor_written(self, gpu_device):
        pair = Pair(gpu_device)
        pair.gpu.last_tokens.fill_(-7)
        pair.add(new_request(1, presence_penalty=1.0), new_request(7))
        tokens = pair.check([7])
        assert pair.gpu.last_tokens.tolist() == [-7] * 7 + tokens
        pair.check([1, 7])
        assert pair.gpu.last_tokens.tolist()[2:7] == [-7] * 5

    def test_rows_without_logits_processors_cost_no_python_loop(self, gpu_device):
        pair = Pair(gpu_device)
        sent = count_sends(pair.gpu)
        pair.add(*(new_request(row, **DRAWN[row]) for row in range(4)), new_request(6))
        assert sent == [3]  # one copy of all rows and parameters
        for batch in pair.batches[1:]:
            batch.logits_states = batch.logprobs = batch.temperature = None  # not read any more
        logits = pair.noise(5)
        pair.submit(logits, range(4), positions=[5] * 4).result()
        pair.submit(logits, [6], positions=[5]).result()
        assert sent == [3]

    def test_repeated_steps_send_nothing(self, gpu_device):
        pair = Pair(gpu_device)
        named = ("bias", "penalties", "allowed ids", "bad words", "min_tokens")
        pair.add(*(new_request(row, logprobs=1, **PROCESSORS[n]) for row, n in enumerate(named)))
        rows = list(range(len(named)))
        pair.check(rows)
        sent = count_sends(pair.gpu)
        for _ in range(4):
            pair.check(rows, is_repeat=True)
        assert sent == []
        pair.check(rows[::-1])
        assert len(sent) == 2

    @pytest.mark.parametrize(
        ("mode", "is_coarse"),
        [*((mode, False) for mode in MODES), ("raw_logprobs", True), ("processed_logits", True)],
    )
    def test_logprobs_equal_those_of_the_cpu(self, gpu_device, mode, is_coarse):
        pair = Pair(gpu_device, mode)
        noise = pair.coarse_noise if is_coarse else pair.noise
        ks = {2: 0, 0: 5, 6: -1, 1: None, 4: 20, 3: 299}
        names = ("bias", "penalties", "allowed ids", "everything", "nothing", "longer bad words")
        pair.add(
            *(
                new_request(row, [9], logprobs=k, **PROCESSORS[name])
                for (row, k), name in zip(ks.items(), names, strict=True)
            )
        )
        rows = list(ks)
        for step in range(2):
            got, want = pair.step(rows, logits=noise(6), is_repeat=step > 0)
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert_same_scores(got.logprobs, want.logprobs)
        got, want = pair.step([2, 1], logits=noise(2))
        assert_same_scores(got.logprobs, want.logprobs)
        assert pair.step([1])[0].logprobs is None

    @pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
    def test_logprobs_of_given_tokens(self, gpu_device, mode):
        pair = Pair(gpu_device, mode)
        asked = {3: [299], 0: [5, 0, 5], 6: list(range(100))}
        pair.add(
            *(new_request(row, logprob_token_ids=ids) for row, ids in asked.items()),
            new_request(1, logprobs=20),
            new_request(2),
        )
        for rows in ([3, 2, 1, 0, 6], [0], [6, 3]):
            logits = pair.noise(len(rows))
            got, want = pair.step(rows, logits=logits)
            assert_same_scores(got.logprobs, want.logprobs)
            scores, end = logits.double(), 0
            if mode.endswith("logprobs"):
                scores = scores.log_softmax(dim=1)
            for index, row in enumerate(rows):
                if row in (1, 2):
                    end += 20 * (row == 1)
                    continue
                begin, end = end, end + len(asked[row])
                assert got.logprobs.top_ids[begin:end].tolist() == asked[row]
                found = got.logprobs.top_logprobs[begin:end]
                assert found == pytest.approx(scores[index, asked[row]].numpy(), abs=1e-5)
            assert end == len(got.logprobs.top_ids)

    @pytest.mark.parametrize("mode", MODES)
    def test_logprobs_of_drawn_rows(self, gpu_device, mode):
        pair = Pair(gpu_device, mode)
        rows = [4, 0, 5]
        chosen = zip(rows, DRAWN[:4:1], strict=False)
        pair.add(*(new_request(row, logprobs=4, logit_bias={3: 4.0}, **o) for row, o in chosen))
        logits = pair.noise(3)
        columns = pair.columns(rows)
        reported = logits
        if mode.startswith("processed"):
            reported = plain.filtered(pair.processed(logits, rows), columns)
        got, _ = pair.step(rows, logits=logits)
        tokens = torch.from_numpy(got.token_ids)
        want = plain.score(reported, tokens, 4, mode.endswith("logprobs"))
        scores = got.logprobs
        assert scores.ks == [4, 4, 4]
        assert scores.logprobs == pytest.approx(want[0].numpy(), abs=1e-5)
        assert scores.ranks.tolist() == want[1].tolist()
        assert scores.top_logprobs == pytest.approx(want[2].numpy().ravel(), abs=1e-5)
        assert scores.top_ids.tolist() == want[3].ravel().tolist()

    def test_logprobs_of_many_rows_are_computed_in_pieces(self, gpu_device):
        pair = Pair(gpu_device)
        pair.gpu.scorer.rows_at_once = 2
        pair.add(*(new_request(row, logprobs=row) for row in range(5)), new_request(7))
        for rows in ([0, 1, 2, 3, 4], [4, 7, 1, 0]):
            got, want = pair.step(rows)
            assert_same_scores(got.logprobs, want.logprobs)

    def test_a_row_without_allowed_tokens_still_gives_a_token(self, gpu_device):
        pair = Pair(gpu_device)
        for temperature in (0, 1.0):
            options = {"temperature": temperature, "allowed_token_ids": [5], "top_p": 0.5}
            pair.add(new_request(0, bad_words=[[5]], **options))
            got, _ = pair.step([0])
            assert 0 <= got.token_ids[0] < VOCAB_SIZE

    def test_ids_outside_of_the_vocabulary_are_ignored(self, gpu_device):
        pair = Pair(gpu_device)
        bias = {600: 9.0, 5: 1.0}
        words = [[800], [1, 900], [700, 5]]
        only = {"allowed_token_ids": [500, 5], "logit_bias": bias, "bad_words": words}
        pair.add(
            new_request(0, **only, min_tokens=1, repetition_penalty=1.5),
            new_request(1, prompt=[1, 299, 7], allowed_token_ids=[800]),
        )
        pair.check([0, 1])

    def test_several_chunks_of_a_row(self, gpu_device):
        pair = Pair(gpu_device, vocab_size=1100)
        late = {"logit_bias": {1050: 6.0, 700: 5.0}, "repetition_penalty": 1.4}
        pair.add(
            new_request(0, [1050, 700], logprobs=3, **late),
            new_request(1, allowed_token_ids=[1099, 515, 30], logprobs=700),
        )
        for _ in range(2):
            got, want = pair.step([1, 0])
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert_same_scores(got.logprobs, want.logprobs)

    def test_warm_up_leaves_no_state(self, gpu_device):
        pair = Pair(gpu_device, "processed_logprobs")
        gpu_device.synchronize()
        before = pair.gpu.last_tokens.tolist()
        logits = pair.noise(2).to(gpu_device.torch_device, torch.float16)
        pair.gpu.warm_up(logits)
        gpu_device.synchronize()
        assert pair.gpu.last_tokens.tolist() == before
        pair.add(
            *(new_request(row, **PROCESSORS[name]) for row, name in enumerate(list(PROCESSORS)[:4]))
        )
        pair.check(range(4))

    def test_a_step_without_samples(self, gpu_device):
        pair = Pair(gpu_device)
        got = pair.submit(torch.empty(0, VOCAB_SIZE), []).result()
        assert (got.token_ids.tolist(), got.logprobs) == ([], None)


def assert_same_scores(got, want) -> None:
    """Compare log-probabilities. Tokens of minus infinity may be in any order."""
    assert got.ks == want.ks
    assert got.ranks.tolist() == want.ranks.tolist()
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert getattr(got, name).dtype == getattr(want, name).dtype
        assert getattr(got, name).shape == getattr(want, name).shape
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
    assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=1e-5)
    is_finite = np.isfinite(want.top_logprobs)
    assert got.top_ids[is_finite].tolist() == want.top_ids[is_finite].tolist()


def count_sends(sampler: GpuSampler) -> list[int]:
    """Return a list that grows with each copy to the device, by the copy's number of arrays."""
    sent: list[int] = []
    send = sampler.transfers.send

    def counting(*arrays):
        sent.append(len(arrays))
        return send(*arrays)

    sampler.transfers.send = counting
    return sent
