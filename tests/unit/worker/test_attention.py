"""PagedAttention against attention written as loops over tokens, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shmllm.core.plan import Admission, BlockAppend, StepPlan
from shmllm.models.config import ModelConfig
from shmllm.sampling_params import SamplingParams
from shmllm.worker.attention import PagedAttention
from shmllm.worker.attention_groups import MAX_QUERY_ROWS
from shmllm.worker.batch import InputBatch
from shmllm.worker.slabs import Slabs

HEAD_DIM = 8
TOLERANCE = 2e-5
GARBAGE = 50.0


def make_config(*, num_heads=4, num_kv_heads=2, windows=(None,)):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=num_heads * HEAD_DIM,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        layer_windows=tuple(windows),
    )


def attend_naively(query, keys, values, window):
    """One query (heads, dim) at the last of (n, kv heads, dim); returns (heads, dim)."""
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    begin = 0 if window is None else max(0, len(keys) - window)
    output = np.zeros_like(query)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = keys[begin:, kv_head] @ query[head] / math.sqrt(query.shape[1])
        weights = np.exp(scores - scores.max())
        output[head] = weights / weights.sum() @ values[begin:, kv_head]
    return output


@pytest.fixture(params=[0, 36 * 2**10, 2**24], ids=["no-slabs", "few-slabs", "slabs"], autouse=True)
def slab_bytes(request, monkeypatch):
    """Everything holds with contexts gathered, in slabs, and in both ways in one step."""
    monkeypatch.setattr(Rig, "slab_bytes", request.param)
    return request.param


class Rig:
    """Runs steps through PagedAttention and through the loops, and compares.

    Blocks are handed out in random order; every slot that was not written holds garbage, so
    that a read of a wrong slot shows.
    """

    slab_bytes = 0

    def __init__(
        self,
        config,
        *,
        block_size=16,
        num_rows=6,
        max_model_len=320,
        num_blocks=160,
    ):
        self.config = config
        self.block_size = block_size
        self.random = np.random.default_rng(7)
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, HEAD_DIM)
        self.cache = torch.full(shape, GARBAGE)
        self.batch = InputBatch(num_rows, max_model_len, block_size, 100)
        self.slabs = Slabs(config, torch.float32, num_rows, max_model_len, self.slab_bytes)
        self.attention = PagedAttention(config, self.cache, self.slabs)
        self.free = list(self.random.permutation(np.arange(1, num_blocks)))
        self.admitted = set()
        self.blocks = {}
        self.lengths = {}
        self.keys = {}
        self.values = {}

    def start(self, row, shared=()):
        """A new request in a row, whose first blocks are those of another one's prefix."""
        self.blocks[row] = list(shared)
        self.lengths[row] = len(shared) * self.block_size

    def step(self, *work):
        """work: (row, tokens). Compares every layer; returns the outputs of the last."""
        plan = StepPlan(step=0)
        for row, count in work:
            self._plan(plan, row, count)
        self.batch.update(plan)
        self.attention.begin_step(self.batch.inputs(plan), self.batch)
        for layer in range(self.config.num_layers):
            outputs = self._compare(layer, plan)
        return outputs

    def _plan(self, plan, row, count):
        start, end = self.lengths[row], self.lengths[row] + count
        table = self.blocks[row]
        first = len(table)
        while len(table) * self.block_size < end:
            table.append(int(self.free.pop()))
        if row in self.admitted:
            plan.block_appends.append(BlockAppend(row, first, table[first:]))
        else:
            self.admitted.add(row)
            plan.admissions.append(Admission(row, [1], list(table), SamplingParams(), 0, 0, ()))
        plan.rows.append(row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.num_tokens += count
        self.lengths[row] = end

    def _draw(self, tokens, heads):
        return self.random.standard_normal((tokens, heads, HEAD_DIM)).astype(np.float32)

    def _compare(self, layer, plan):
        config = self.config
        query = self._draw(plan.num_tokens, config.num_heads)
        key = self._draw(plan.num_tokens, config.num_kv_heads)
        value = self._draw(plan.num_tokens, config.num_kv_heads)
        got = self.attention(layer, *map(torch.from_numpy, (query, key, value)))
        spans, offset = [], 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            spans.append((row, start, offset, count))
            for index in range(count):
                block = self.blocks[row][(start + index) // self.block_size]
                slot = (layer, block, (start + index) % self.block_size)
                self.keys[slot] = key[offset + index].astype(np.float64)
                self.values[slot] = value[offset + index].astype(np.float64)
            offset += count
        wanted = np.concatenate([self._attend_span(layer, query, *span) for span in spans])
        wanted = wanted.reshape(plan.num_tokens, -1)
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got.numpy(), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        return got

    def _attend_span(self, layer, query, row, start, offset, count):
        slots = [
            (layer, self.blocks[row][position // self.block_size], position % self.block_size)
            for position in range(start + count)
        ]
        keys = np.stack([self.keys[slot] for slot in slots])
        values = np.stack([self.values[slot] for slot in slots])
        return np.stack(
            [
                attend_naively(
                    query[offset + index].astype(np.float64),
                    keys[: start + index + 1],
                    values[: start + index + 1],
                    self.config.layer_windows[layer],
                )
                for index in range(count)
            ]
        )


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["MHA", "GQA", "MQA"])
def test_a_prompt_and_its_decodes(block_size, heads):
    config = make_config(num_heads=heads[0], num_kv_heads=heads[1])
    rig = Rig(config, block_size=block_size)
    rig.start(0)
    rig.step((0, 37))
    for _ in range(4):
        rig.step((0, 1))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_lengths_around_a_block(length):
    rig = Rig(make_config())
    rig.start(0)
    rig.step((0, length))
    rig.step((0, 1))


def test_chunks_attend_to_earlier_chunks():
    rig = Rig(make_config())
    rig.start(0)
    for count in (10, 1, 23, 2):
        rig.step((0, count))


def test_decodes_of_very_different_contexts():
    rig = Rig(make_config())
    for row, length in enumerate((300, 1, 255, 256, 257, 30)):
        rig.start(row)
        rig.step((row, length))
    rig.step(*((row, 1) for row in (3, 0, 5, 1, 4, 2)))


def test_chunks_and_decodes_in_one_step():
    rig = Rig(make_config())
    for row in range(6):
        rig.start(row)
    rig.step((0, 280), (1, 3), (2, 17))
    rig.step((2, 1), (0, 1), (3, 40), (1, 1), (4, 1), (5, 9))
    rig.step((4, 5), (5, 1), (3, 1), (2, 30), (0, 2), (1, 1))


@pytest.mark.parametrize("count", [MAX_QUERY_ROWS, MAX_QUERY_ROWS + 1, 2 * MAX_QUERY_ROWS + 70])
def test_chunks_longer_than_one_attention_call(count):
    rig = Rig(make_config(num_heads=2, num_kv_heads=1), max_model_len=640)
    rig.start(0)
    rig.start(1)
    rig.step((1, 6), (0, 20))
    rig.step((1, 1), (0, count))


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 300])
def test_sliding_windows(window):
    rig = Rig(make_config(windows=(window,)))
    rig.start(0)
    rig.start(1)
    rig.step((0, 40), (1, 3))
    rig.step((0, 1), (1, 20))
    rig.step((0, 1), (1, 1))


def test_layers_with_different_windows_keep_their_own_keys():
    rig = Rig(make_config(windows=(None, 4, 9)))
    rig.start(0)
    rig.start(1)
    rig.step((0, 21), (1, 5))
    rig.step((0, 1), (1, 2))


def test_requests_that_share_blocks_of_a_prefix():
    rig = Rig(make_config())
    rig.start(0)
    rig.step((0, 40))
    rig.start(1, shared=rig.blocks[0][:2])
    rig.step((0, 1), (1, 7))
    rig.step((0, 1), (1, 1))


def test_a_prefix_written_and_shared_in_one_step():
    rig = Rig(make_config(windows=(None, 6)))
    rig.start(0)
    table = [int(rig.free.pop()) for _ in range(2)]
    rig.blocks[0] = list(table)
    rig.start(1, shared=table)
    rig.step((0, 35), (1, 4))


def test_the_order_of_the_plan_does_not_matter():
    plan_counts = {0: 1, 1: 19, 2: 3}
    outputs = {}
    for order in ((0, 1, 2), (2, 0, 1)):
        rig = Rig(make_config())
        for row in range(3):
            rig.start(row)
        rig.blocks = {0: [5], 1: [9, 4], 2: [7]}
        rig._draw = lambda tokens, heads, order=order: np.concatenate(
            [
                np.random.default_rng([row, heads])
                .standard_normal((plan_counts[row], heads, HEAD_DIM))
                .astype(np.float32)
                for row in order
            ]
        )
        got = rig.step(*((row, plan_counts[row]) for row in order))
        offset = 0
        for row in order:
            outputs.setdefault(row, []).append(got[offset : offset + plan_counts[row]])
            offset += plan_counts[row]
    for first, second in outputs.values():
        torch.testing.assert_close(first, second, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_row_that_gets_another_request_keeps_nothing_of_the_last():
    rig = Rig(make_config())
    rig.start(0)
    rig.start(1)
    rig.step((0, 50), (1, 40))
    rig.start(0, shared=rig.blocks[1][:2])
    rig.admitted.remove(0)
    rig.step((0, 3), (1, 1))
    rig.step((1, 1), (0, 1))


def test_memory_that_was_given_back_is_filled_again():
    rig = Rig(make_config(windows=(None, 6)))
    for row in range(3):
        rig.start(row)
    rig.step((0, 35), (1, 40), (2, 5))
    rig.step((0, 1), (1, 1))
    rig.attention.release()
    assert rig.attention.slab_bytes == 0
    rig.step((0, 1), (1, 1))
    rig.attention.release()
    rig.step((2, 1), (0, 1))
    rig.step((1, 1), (0, 1), (2, 4))


def test_decoding_on_past_what_was_laid_out():
    rig = Rig(make_config(windows=(None, 40)), num_rows=3)
    for row in (2, 0, 1):
        rig.start(row)
    rig.step((2, 250), (0, 25), (1, 30))
    for _ in range(12):
        rig.step((2, 1), (0, 1), (1, 1))


def test_rows_far_apart():
    rig = Rig(make_config(), num_rows=64, max_model_len=320, num_blocks=100)
    for row in (0, 63, 17, 1):
        rig.start(row)
    rig.step((0, 70), (63, 200), (17, 90), (1, 3))
    rig.step((63, 1), (1, 1), (0, 1), (17, 1))


def test_prompts_of_one_length_side_by_side():
    rig = Rig(make_config(windows=(None, 9)))
    for row in (2, 3, 4, 0):
        rig.start(row)
    rig.step((2, 40), (3, 40), (4, 40), (0, 40))
    rig.step((2, 20), (3, 20), (4, 20), (0, 1))
    rig.step((2, 1), (3, 1), (4, 1), (0, 1))


def test_random_mixtures_over_many_steps():
    rig = Rig(make_config(windows=(None, 12)), block_size=8, num_blocks=200)
    for row in range(6):
        rig.start(row)
    choose = np.random.default_rng(3)
    for _ in range(10):
        rows = choose.permutation(6)[: choose.integers(1, 7)]
        rig.step(*((int(row), int(choose.choice([1, 1, 1, 2, 7, 24]))) for row in rows))


def test_only_the_slots_of_the_step_are_written():
    rig = Rig(make_config())
    before = rig.cache.clone()
    rig.start(0)
    rig.step((0, 5))
    changed = (rig.cache != before).flatten(4).any(-1).nonzero().tolist()
    block = rig.blocks[0][0]
    assert changed == [[0, half, block, slot] for half in range(2) for slot in range(5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_cache(dtype):
    config = make_config()
    cache = torch.zeros((1, 2, 4, 16, 2, HEAD_DIM), dtype=dtype)
    attention = PagedAttention(config, cache, Slabs(config, dtype, 1, 32, 2**20))
    batch = InputBatch(1, 32, 16, 100)
    plan = StepPlan(
        step=0,
        rows=[0],
        starts=[0],
        counts=[3],
        num_tokens=3,
        admissions=[Admission(0, [1, 2, 3], [2], SamplingParams(), 0, 0, ())],
    )
    batch.update(plan)
    attention.begin_step(batch.inputs(plan), batch)
    value = torch.randn(3, 2, HEAD_DIM, dtype=dtype)
    output = attention(0, torch.randn(3, 4, HEAD_DIM, dtype=dtype), value, value)
    assert output.dtype == dtype
    torch.testing.assert_close(output[0].view(4, HEAD_DIM), value[0].repeat_interleave(2, 0))
