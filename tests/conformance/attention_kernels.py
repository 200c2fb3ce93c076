"""The tests of paged attention: it equals a float64 reference, and unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.kernel_helpers import Draw, assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu.attention import AttentionScratch, paged_attention
from shmllm_kernels.gpu.configs import AttentionConfig
from shmllm_kernels.reference.attention import paged_attention as plain_attention
from shmllm_kernels.reference.rope_write import to_float8
from shmllm_kernels.windows import Chunk, Window

SMALL = AttentionConfig(16, 16, 4, 2)
LONG = AttentionConfig(16, 128, 4, 2)


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    return {
        torch.float32: (5e-6, 1e-5),
        torch.float16: (2e-3, 2e-3),
        torch.bfloat16: (1.5e-2, 1e-2),
    }[dtype]


@dataclass(frozen=True)
class Case:
    """The shapes of a batch and of a model.

    Attributes:
        lengths: for each request, (tokens in this step, context length).
        ends: the keys behind a token that it attends to: "all" of its request, a number, those of
            an image that it belongs to (each of 5 tokens, "images", or of any number of them, "long
            images"), or "any" number; None: the attention is causal.
        padding: the number of padded tokens and requests, as a graph has them.
        value_dim: the width of a value; None: that of a key. Each value is behind its key then.
        has_float8: whether keys and values are in FP8.
        has_biases, has_own_biases: whether biases are added to scores: by distance, or those of
            each token.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 8
    window: Window | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    num_splits: int = 1
    config: AttentionConfig = SMALL
    masks_all: bool = False
    ends: int | str | None = None
    padding: int = 0
    heads_first: bool = False
    has_float8: bool = False
    has_biases: bool = False
    has_own_biases: bool = False
    value_dim: int | None = None

    @property
    def tokens(self) -> int:
        return sum(count for count, _ in self.lengths)


def key_ends(draw: Draw, case: Case) -> torch.Tensor | None:
    """Draw the end of the keys that each token attends to, [tokens] int32; see `Case.ends`."""
    if case.ends is None:
        return None
    parts = [torch.zeros(0)]
    for count, context in case.lengths:
        positions, last = torch.arange(context - count, context), torch.tensor(context)
        if case.ends == "all":
            ends = last.expand(count)
        elif case.ends == "images":  # every other one of spans of 5 tokens
            image = positions // 5
            ends = torch.where(image % 2 == 1, (image + 1) * 5, positions + 1)
        elif case.ends == "long images":
            spans = draw.integers(1, 45, 1 + context).cpu().cumsum(0)
            image = torch.searchsorted(spans, positions, right=True)
            ends = torch.where(image % 3 > 0, spans[image], positions + 1)
        elif case.ends == "any":
            ends = positions + 1 + (draw.uniform(count).cpu() * (context - positions)).long()
        else:
            ends = positions + 1 + case.ends
        parts.append(ends.clamp(max=context))
    return torch.cat(parts).to(draw.device, torch.int32)


class Launch:
    """The tensors of a case, with shuffled blocks, and NaN in slots without a token."""

    def __init__(self, draw, dtype, case: Case) -> None:
        self.case, self.device = case, draw.device
        blocks = [-(-context // case.block_size) for _, context in case.lengths]
        num_requests = len(case.lengths) + case.padding
        sizes = [case.dim, case.value_dim or case.dim]
        self.shape = (case.tokens + case.padding, case.heads, sizes[1])
        self.query = draw.normal(*self.shape[:2], case.dim, dtype=dtype)
        self.query[case.tokens :] = torch.nan
        order = draw.permutation(sum(blocks) + 3).int()
        max_blocks = max([*blocks, 1]) + 2
        self.table = torch.full((num_requests, max_blocks), 2**30, dtype=torch.int32)
        shape = len(order), case.block_size, case.kv_heads
        cache = poisoned(*shape, sum(sizes), dtype=dtype, device="cpu")
        taken = 0
        for row, (count, (_, context)) in enumerate(zip(blocks, case.lengths, strict=True)):
            ids = order[taken : taken + count].cpu()
            taken += count
            self.table[row, :count] = ids
            tokens = draw.normal(context, case.kv_heads, sum(sizes), dtype=dtype)
            slots = cache[ids.long()].flatten(0, 1)
            slots[:context] = tokens.cpu()
            cache[ids.long()] = slots.view(-1, *cache.shape[1:])
        if case.heads_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        cache = (to_float8(cache) if case.has_float8 else cache).to(draw.device)
        halves = cache.split_with_sizes(sizes, dim=-1)
        self.cache = torch.stack(halves) if case.value_dim is None else halves
        counts = [count for count, _ in case.lengths] + [0] * case.padding
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.starts = starts.to(draw.device, torch.int32)
        contexts = [context for _, context in case.lengths] + [0] * case.padding
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=draw.device)
        self.table = self.table.to(draw.device)
        self.scale = 1.3 * case.dim**-0.5
        self.sinks = draw.normal(case.heads, dtype=dtype, scale=2.0) if case.has_sinks else None
        self.biases = None
        if case.has_biases:
            most = max((context for _, context in case.lengths), default=1)
            self.biases = draw.normal(case.heads, 2 * most - 1, dtype=torch.float32)
        if case.has_own_biases:
            most = max((context for _, context in case.lengths), default=1)
            self.biases = draw.normal(self.shape[0], case.heads, most + 3, dtype=torch.float32)
        self.ends = key_ends(draw, case)
        if self.ends is not None:
            self.ends = torch.cat((self.ends, self.ends.new_full((case.padding,), 2**30)))

    def tensors(self):
        return self.query, *self.cache, self.table, self.starts, self.contexts

    def run(self) -> torch.Tensor:
        case = self.case
        out = poisoned(*self.shape, dtype=self.query.dtype, device=self.device)
        scratch = None
        if case.num_splits > 1:
            scratch = AttentionScratch.allocate(
                self.shape[0] + 1, case.heads, case.num_splits, self.shape[2], self.device
            )
            scratch.sums.fill_(torch.nan)
            scratch.stats.fill_(torch.nan)
        rules = case.window, case.soft_cap, self.sinks
        options = *rules, case.num_splits, scratch, case.masks_all, self.ends, self.biases
        paged_attention(out, *self.tensors(), case.config, self.scale, *options)
        return out

    def want(self) -> torch.Tensor:
        case = self.case
        rules = case.window, case.soft_cap, self.sinks, self.ends, self.biases
        return plain_attention(*self.tensors(), self.scale, *rules)

    def check(self) -> torch.Tensor:
        got, tokens = self.run(), self.case.tokens
        assert got[tokens:].isnan().all(), "a padded token was written"
        assert_close(got[:tokens], self.want()[:tokens], *tolerances(got.dtype))
        return got


MIXED = ((1, 21), (5, 5), (1, 1), (19, 30), (1, 16))
DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 33))
FEATURES = {
    "plain": {},
    "window": {"window": 7},
    "wide window": {"window": 18},
    "narrow window": {"window": 3},
    "chunks": {"window": Chunk(7)},
    "cap": {"soft_cap": 0.7},
    "sinks": {"has_sinks": True},
    "window, cap and sinks": {"window": 7, "soft_cap": 2.0, "has_sinks": True},
}


BOTH_WAYS = {
    "all of the request": {"ends": "all"},
    "a local layer": {"ends": 3, "window": 4},
    "a wide local layer": {"ends": 17, "window": 18},
    "images": {"ends": "images"},
    "images and a window": {"ends": "images", "window": 7},
    "long images": {"ends": "long images"},
    "long images and a window": {"ends": "long images", "window": 7},
    "any ends": {"ends": "any"},
    "any ends, a window, cap and sinks": {"ends": "any", **FEATURES["window, cap and sinks"]},
}


BIASED = {
    "all of the request": {"ends": "all"},
    "any ends, a window, cap and sinks": BOTH_WAYS["any ends, a window, cap and sinks"],
    "a local layer": {"ends": 3, "window": 4},
    "causal": {},
    "masked": {"masks_all": True},
}


def product_of_single_rows(a, b, dtype=None):
    """Multiply row by row, for the interpreter: the bits of a row of numpy's matmul depend on its
    index in the matrix."""
    return np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype), optimize=False)


def widened(window: Window, factor: int) -> Window:
    return Chunk(window.size * factor) if isinstance(window, Chunk) else window * factor


class AttentionConformance:
    @pytest.mark.parametrize("splits", [1, 2])
    @pytest.mark.parametrize("feature", FEATURES)
    def test_a_mixed_batch(self, draw, dtype, feature, splits):
        kv_heads = 3 - splits
        Launch(
            draw, dtype, Case(MIXED, 4, kv_heads, num_splits=splits, **FEATURES[feature])
        ).check()

    @pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
    def test_head_sizes(self, draw, dtype, dim):
        Launch(draw, dtype, Case(((1, 19), (4, 9)), dim=dim)).check()

    @pytest.mark.parametrize(
        ("dims", "feature", "splits"),
        diagonal([(24, 16), (16, 80), (192, 128)], ["plain", "window, cap and sinks"], [1, 2]),
    )
    def test_values_of_another_width(self, draw, dtype, dims, feature, splits):
        sizes = {"dim": dims[0], "value_dim": dims[1], "num_splits": splits}
        case = Case(MIXED, 4, 2, padding=2, **sizes, **FEATURES[feature])
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
    @pytest.mark.parametrize("tile", [16, 32])
    def test_block_sizes_and_tiles(self, draw, dtype, block_size, tile):
        config = replace(SMALL, tile=tile)
        Launch(draw, dtype, Case(((1, 37), (3, 18)), block_size=block_size, config=config)).check()

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (32, 2)])
    def test_groups_of_heads(self, draw, dtype, heads, kv_heads):
        Launch(draw, dtype, Case(((1, 18), (5, 6)), heads, kv_heads)).check()

    @pytest.mark.parametrize(("splits", "kv_heads"), [(2, 2), (8, 1)])
    def test_split_decodes(self, draw, dtype, splits, kv_heads):
        Launch(draw, dtype, Case(DECODES, 4, kv_heads, num_splits=splits)).check()

    @pytest.mark.parametrize("block_m", [32, 64])
    def test_more_rows_in_a_program(self, draw, dtype, block_m):
        config = replace(SMALL, block_m=block_m)
        Launch(draw, dtype, Case(((40, 47), (1, 9), (17, 17)), config=config)).check()

    @pytest.mark.parametrize("splits", [1, 2])
    def test_padding_is_skipped(self, draw, dtype, splits):
        Launch(draw, dtype, Case(((1, 9), (3, 5)), num_splits=splits, padding=5)).check()

    def test_requests_without_tokens_among_others(self, draw, dtype):
        Launch(draw, dtype, Case(((0, 0), (1, 9), (0, 0), (0, 12), (2, 3)))).check()

    def test_a_launch_without_requests(self, draw, dtype):
        Launch(draw, dtype, Case(())).check()
        Launch(draw, dtype, Case((), padding=3)).check()

    def test_a_cache_by_head_then_token(self, draw, dtype):
        Launch(draw, dtype, Case(MIXED, heads_first=True)).check()

    def test_a_strided_query(self, draw, dtype):
        launch = Launch(draw, dtype, Case(((1, 9), (3, 5))))
        wide = draw.normal(4, 9, 16, dtype=dtype)
        launch.query = wide[:, 2:6]
        launch.check()

    def test_large_scores(self, draw, dtype):
        launch = Launch(draw, dtype, Case(((1, 40), (3, 20))))
        launch.scale = 40.0
        # The rounding error of a weight grows with the difference of the scores.
        got = launch.run()
        assert_close(got, launch.want(), 10 * tolerances(dtype)[0], 10 * tolerances(dtype)[1])

    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_requests_bits_do_not_depend_on_the_batch(self, draw, dtype, splits):
        case = Case(MIXED, 2, 1, num_splits=splits, window=20)
        launch = Launch(draw, dtype, case)
        got = launch.run()
        for index in (0, 3):
            begin, end = launch.starts[index : index + 2].tolist()
            alone = Launch(draw, dtype, replace(case, lengths=(MIXED[index],)))
            alone.query, alone.cache = launch.query[begin:end], launch.cache
            alone.table = launch.table[index : index + 1]
            assert torch.equal(alone.run(), got[begin:end])

    @pytest.mark.parametrize("window", [None, 11, Chunk(11)])
    def test_a_tokens_bits_do_not_depend_on_chunks(self, draw, dtype, window, monkeypatch):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        case = Case(((37, 37),), window=window, masks_all=True)
        launch = Launch(draw, dtype, case)
        whole = launch.run()
        for begin, end in ((0, 5), (5, 16), (16, 36), (36, 37)):
            part = Launch(draw, dtype, replace(case, lengths=((end - begin, end),)))
            part.query, part.cache, part.table = launch.query[begin:end], launch.cache, launch.table
            assert torch.equal(part.run(), whole[begin:end])

    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("splits", [1, 4])
    def test_a_long_context(self, draw, dtype, feature, splits):
        options = dict(FEATURES[feature])
        if "window" in options:
            options["window"] = widened(options["window"], 100)
        if dtype is torch.float16 and splits == 4:
            return  # The interpreter is slow; float32 runs these cases.
        config = {"config": LONG, "num_splits": splits, "block_size": 16}
        Launch(draw, dtype, Case(((3, 2000),), kv_heads=1, **config, **options)).check()

    @pytest.mark.parametrize("splits", [1, 2])
    @pytest.mark.parametrize("feature", BOTH_WAYS)
    def test_keys_behind_a_token(self, draw, dtype, feature, splits):
        case = Case(MIXED, 4, 3 - splits, num_splits=splits, padding=2, **BOTH_WAYS[feature])
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize(("splits", "rules"), diagonal([1, 2], [*BIASED]))
    def test_biases_of_distances(self, draw, dtype, splits, rules):
        """With rows of a program that no token has, and tiles in which every row sees every key."""
        lengths, config = ((1, 1), (19, 30), (40, 50)), replace(SMALL, block_m=32)
        case = Case(lengths, 3, 1, config=config, num_splits=splits, has_biases=True, padding=2)
        Launch(draw, dtype, replace(case, **BIASED[rules])).check()

    @pytest.mark.parametrize(("splits", "rules"), diagonal([1, 2], [*BIASED]))
    def test_biases_of_tokens(self, draw, dtype, splits, rules):
        lengths, config = ((1, 1), (19, 30), (40, 50)), replace(SMALL, block_m=32)
        case = Case(lengths, 3, 1, config=config, num_splits=splits, has_own_biases=True, padding=2)
        Launch(draw, dtype, replace(case, **BIASED[rules])).check()

    @pytest.mark.parametrize("masks_all", [False, True])
    @pytest.mark.parametrize("feature", BOTH_WAYS)
    def test_keys_behind_the_tokens_of_a_program(self, draw, dtype, feature, masks_all):
        config = replace(SMALL, block_m=32)
        case = Case(((70, 90), (33, 33)), config=config, masks_all=masks_all, **BOTH_WAYS[feature])
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"), [(1, 1, 64), (3, 3, 32), (7, 1, 80), (4, 2, 128), (2, 2, 256)]
    )
    def test_heads_that_attend_both_ways(self, draw, dtype, heads, kv_heads, dim):
        case = Case(((18, 18), (5, 23)), heads, kv_heads, dim, ends="any")
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize(
        ("splits", "window", "config"),
        [(1, 9, SMALL), (2, 9, SMALL), (1, None, replace(SMALL, block_m=32)), (2, None, SMALL)],
    )
    def test_ends_behind_each_token_make_it_causal(self, draw, dtype, splits, window, config):
        lengths = *MIXED, (40, 70)
        case = Case(lengths, num_splits=splits, window=window, config=config)
        launch = Launch(draw, dtype, case)
        causal = launch.run()
        parts = [torch.arange(context - count, context) + 1 for count, context in lengths]
        launch.ends = torch.cat(parts).to(draw.device, torch.int32)
        assert torch.equal(launch.run(), causal)

    def test_bits_of_a_request_both_ways_do_not_depend_on_the_batch(self, draw, dtype):
        lengths = ((5, 5), (37, 37), (20, 20))
        launch = Launch(draw, dtype, Case(lengths, 2, 1, ends="all"))
        got = launch.run()
        begin, end = launch.starts[1:3].tolist()
        alone = Launch(draw, dtype, replace(launch.case, lengths=lengths[1:2]))
        alone.query, alone.cache = launch.query[begin:end], launch.cache
        alone.table = launch.table[1:2]
        assert torch.equal(alone.run(), got[begin:end])

    @pytest.mark.parametrize("feature", BOTH_WAYS)
    def test_a_long_context_both_ways(self, draw, dtype, feature):
        options = {"config": LONG, "block_size": 16, **BOTH_WAYS[feature]}
        if "window" in options:
            options["window"] = widened(options["window"], 50)
        Launch(draw, dtype, Case(((3, 1000), (40, 600)), 2, 1, **options)).check()

    def test_wrong_arguments_are_refused(self, draw, dtype):
        launch = Launch(draw, dtype, Case(((1, 9),)))
        launch.table = launch.table.long()
        with pytest.raises(AssertionError, match="int32"):
            launch.run()
        launch = Launch(draw, dtype, Case(((1, 9),), ends="all"))
        launch.ends = launch.ends.long()
        with pytest.raises(AssertionError, match="ends are int32"):
            launch.run()
        launch = Launch(draw, dtype, Case(((1, 9),), num_splits=3))
        with pytest.raises(AssertionError, match="power of two"):
            launch.run()
        launch = Launch(draw, dtype, Case(((1, 9),)))
        launch.query = launch.query.transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(AssertionError, match="contiguous"):
            launch.run()
