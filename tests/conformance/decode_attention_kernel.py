"""The tests of the attention of decodes with rotation, write and join: it equals the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from conformance.attention_kernels import FEATURES, SMALL
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal, each_once

from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import AttentionConfig, next_power_of_two
from shmllm_kernels.gpu.decode_attention import MAX_TOKENS, decode_attention
from shmllm_kernels.reference.attention import paged_attention
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth, rope_and_write, to_float8
from shmllm_kernels.windows import Chunk, Window

CONTEXTS = (1, 15, 16, 17, 33, 2)
ONE = {}
SEVERAL = {"counts": (1, 4, 3, 5, 6, 2), "max_tokens": 6}
"""Numbers of new tokens for `CONTEXTS`; some requests have no other tokens."""
EPS = 1e-6


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the absolute and the relative tolerance: a rotated query or key may be rounded to the
    next number of the dtype."""
    return {
        torch.float32: (1e-5, 1e-5),
        torch.float16: (6e-3, 4e-3),
        torch.bfloat16: (4e-2, 3e-2),
    }[dtype]


@dataclass(frozen=True)
class Decodes:
    """The shapes of a step and of a model; see `attention_kernels.Case`.

    Attributes:
        contexts: the context length of each request, its new tokens included.
        counts: the number of new tokens of each request; None: one each.
        max_tokens: the most that a request may have.
        rotary_dim: how many elements of a head are rotated; None: nothing is.
        norm: "", "offset", "values", which is a norm of queries, keys and values, "behind" the
            rotation, "layer", a LayerNorm before it, or "bias", one with a bias.
        growth: the factor of rotated queries.
        over_row: whether the norms of queries and keys are those of all heads side by side.
        over_each: whether each head has weights of its own.
        gated: whether the output is multiplied by sigmoids of gates.
        padding: the number of padded requests, and of padded tokens.
        has_float8: whether keys and values are in FP8.
        value_dim: the width of a value; None: that of a key. Each value is behind its key then.
    """

    contexts: tuple[int, ...] = CONTEXTS
    counts: tuple[int, ...] | None = None
    max_tokens: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 8
    rotary_dim: int | None = 16
    interleaved: bool = False
    norm: str | None = None
    growth: QueryGrowth | None = None
    over_row: bool = False
    over_each: bool = False
    gated: bool = False
    window: Window | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    num_splits: int = 1
    config: AttentionConfig = SMALL
    padding: int = 0
    loads_first: bool = False
    has_float8: bool = False
    value_dim: int | None = None

    @property
    def counts_of_all(self) -> tuple[int, ...]:
        return self.counts or (1,) * len(self.contexts)

    @property
    def tokens(self) -> int:
        return sum(self.counts_of_all)


class Step:
    """The tensors of a step, with shuffled blocks, and NaN in slots without a token."""

    def __init__(self, draw, dtype, case: Decodes) -> None:
        self.case = case
        requests, padded = len(case.contexts), case.tokens + case.padding
        blocks = [-(-context // case.block_size) for context in case.contexts]
        order = draw.permutation(sum(blocks) + 2).int().cpu()
        table = torch.full((requests + case.padding, max(blocks) + 2), 2**30, dtype=torch.int32)
        sizes = [case.dim, case.value_dim or case.dim]
        shape = len(order), case.block_size, case.kv_heads
        cache = poisoned(*shape, sum(sizes), dtype=dtype, device="cpu")
        slots, taken = [], 0
        for row, (count, context, new) in enumerate(
            zip(blocks, case.contexts, case.counts_of_all, strict=True)
        ):
            ids = order[taken : taken + count]
            taken += count
            table[row, :count] = ids
            places = (ids[:, None] * case.block_size + torch.arange(case.block_size)).flatten()
            before = places[: context - new].long()
            cache.view(-1, case.kv_heads, sum(sizes))[before] = draw.normal(
                context - new, case.kv_heads, sum(sizes), dtype=dtype
            ).cpu()
            slots += places[context - new : context].tolist()
        cache = (to_float8(cache) if case.has_float8 else cache).to(draw.device)
        halves = cache.split_with_sizes(sizes, dim=-1)
        self.cache = torch.stack(halves) if case.value_dim is None else halves
        self.table = table.to(draw.device)
        self.slots = torch.tensor(slots + [-1] * case.padding, device=draw.device)
        counts = [*case.counts_of_all, *([0] * case.padding)]
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(draw.device, torch.int32)
        contexts = [*case.contexts, *([0] * case.padding)]
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=draw.device)
        # Queries, keys, values, gates, and what is none of them.
        widths = [(case.heads + case.kv_heads) * case.dim, case.kv_heads * sizes[1]]
        widths += [case.heads * sizes[1], case.dim]
        rows = draw.normal(padded, sum(widths), dtype=dtype)
        rows[case.tokens :] = torch.nan
        heads, values, gates, _ = rows.split_with_sizes(widths, dim=1)
        self.heads, self.values = heads.unflatten(1, (-1, case.dim)), None
        if case.value_dim is None:
            self.heads = rows[:, : sum(widths[:2])].unflatten(1, (-1, case.dim))
        else:
            self.values = values.unflatten(1, (-1, sizes[1]))
        self.gates = gates.unflatten(1, (-1, sizes[1])) if case.gated else None
        self.cos = self.sin = None
        if case.rotary_dim is not None:
            angles = draw.normal(padded, case.rotary_dim // 2, scale=3.0)
            self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
            self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
            self.cos[case.tokens :] = self.sin[case.tokens :] = torch.nan
        self.norms = None
        if case.norm is not None:
            has_own = case.over_row or case.over_each
            counts = (case.heads, case.kv_heads) if has_own else (1, 1)
            weights = [draw.normal(count * case.dim, dtype=dtype) for count in counts]
            if case.over_each:
                weights = [weight.unflatten(0, (-1, case.dim)) for weight in weights]
            offset = 1.0 if case.norm == "offset" else 0.0
            has_bias = case.norm == "bias"
            if has_bias:
                weights = [draw.normal(2, case.dim, dtype=dtype) for _ in range(2)]
            kinds = case.norm == "values", case.norm == "behind", case.norm in ("layer", "bias")
            self.norms = HeadNorms(*weights, EPS, offset, *kinds, has_bias)
        self.sinks = draw.normal(case.heads, dtype=dtype, scale=2.0) if case.has_sinks else None
        self.scale = 1.3 * case.dim**-0.5
        shape = padded, case.heads, sizes[1]
        self.out = poisoned(*shape, dtype=dtype, device=draw.device)
        self.scratch = None
        if case.num_splits > 1:
            of_parts = padded + 1, case.heads, case.num_splits, sizes[1]
            self.scratch = AttentionScratch.allocate(*of_parts, draw.device)
            self.scratch.sums.fill_(torch.nan)
            self.scratch.stats.fill_(torch.nan)

    def run(self, **options) -> torch.Tensor:
        case, step = self.case, (self.table, self.starts, self.contexts, self.slots)
        rotation = self.cos, self.sin, self.norms, case.interleaved
        rules = case.window, case.soft_cap, self.sinks, case.num_splits, self.scratch
        decode_attention(
            self.out, self.heads, *self.cache, *step, case.config, self.scale, *rotation, *rules,
            max_tokens=case.max_tokens, loads_first=case.loads_first, gates=self.gates,
            growth=case.growth, values=self.values, **options,
        )  # fmt: skip
        return self.out

    def want(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output, and the cache."""
        case, cache = self.case, [half.clone() for half in self.cache]
        query = torch.empty_like(self.heads[:, : case.heads])
        tables = (None, None) if self.cos is None else (self.cos[:, None], self.sin[:, None])
        rows = zip(case.contexts, case.counts_of_all, strict=True)
        positions = [torch.arange(context - count, context) for context, count in rows]
        of_tokens = torch.cat([*positions, torch.zeros(case.padding, dtype=torch.int64)])
        rope_and_write(
            query, *cache, self.heads, *tables, self.slots, self.norms, case.interleaved,
            case.growth, of_tokens.to(query.device), self.values,
        )  # fmt: skip
        step = self.table, self.starts, self.contexts
        rules = case.window, case.soft_cap, self.sinks
        out = paged_attention(query, *cache, *step, self.scale, *rules)
        return (out if self.gates is None else out * self.gates.sigmoid()), cache

    def check(self) -> torch.Tensor:
        (wanted, cache), tokens = self.want(), self.case.tokens
        got = self.run()
        limits = tolerances(got.dtype)
        assert got[tokens:].isnan().all(), "a padded token was written"
        assert_close(got[:tokens], wanted[:tokens], *limits)
        for half, want in zip(self.cache, cache, strict=True):
            assert torch.equal(half.isnan(), want.isnan()), "another slot was written"
            assert_close(half.nan_to_num(), want.nan_to_num(), *limits)
        if self.scratch is not None:
            assert not self.scratch.counters.any(), "a counter was left"
        return got


class DecodeAttentionConformance:
    @pytest.mark.parametrize(
        ("feature", "new", "splits", "loads_first"),
        diagonal(list(FEATURES), [ONE, SEVERAL], [1, 4], [False, True]),
    )
    def test_decodes(self, draw, dtype, feature, splits, loads_first, new):
        options = {"num_splits": splits, "loads_first": loads_first, **FEATURES[feature]}
        Step(draw, dtype, Decodes(**options, **new)).check()

    @pytest.mark.parametrize(
        ("sizes", "feature", "splits", "new", "others"),
        diagonal(
            [(24, 16), (16, 80), (192, 128)],
            ["plain", "window, cap and sinks"],
            [1, 4],
            [ONE, SEVERAL],
            [{}, {"gated": True, "norm": "values"}],
        ),
    )
    def test_values_of_another_width(self, draw, dtype, sizes, feature, splits, new, others):
        options = {"dim": sizes[0], "value_dim": sizes[1], "num_splits": splits, "padding": 2}
        options |= FEATURES[feature] | new | others
        Step(draw, dtype, Decodes(**options)).check()

    @pytest.mark.parametrize("new", [ONE, {"counts": (4, 3), "max_tokens": 4}])
    @pytest.mark.parametrize("norm", [None, "", "offset", "values", "behind"])
    @pytest.mark.parametrize(
        ("rotary_dim", "interleaved"),
        [(None, False), (24, False), (8, False), (24, True), (8, True)],
    )
    def test_norms_and_rotations(self, draw, dtype, norm, rotary_dim, interleaved, new):
        options = {"norm": norm, "rotary_dim": rotary_dim, "interleaved": interleaved}
        Step(draw, dtype, Decodes((9, 3), dim=24, **options, **new)).check()

    @pytest.mark.parametrize("new", [ONE, {"counts": (4, 3), "max_tokens": 4}])
    @pytest.mark.parametrize("num_splits", [1, 2])
    def test_queries_that_grow_with_their_position(self, draw, dtype, num_splits, new):
        growth = QueryGrowth(0.5, 2, 1, power=0.3 if num_splits == 2 else 0.0)
        options = {"growth": growth, "num_splits": num_splits}
        Step(draw, dtype, Decodes((9, 3), dim=24, rotary_dim=24, **options, **new)).check()

    @pytest.mark.parametrize("new", [ONE, {"counts": (4, 3), "max_tokens": 4}])
    @pytest.mark.parametrize("norm", ["", "offset", "values"])
    @pytest.mark.parametrize(("rotary_dim", "interleaved"), [(None, False), (24, False), (8, True)])
    def test_norms_of_all_heads(self, draw, dtype, norm, rotary_dim, interleaved, new):
        options = {"norm": norm, "rotary_dim": rotary_dim, "interleaved": interleaved}
        Step(draw, dtype, Decodes((9, 3), dim=24, over_row=True, **options, **new)).check()

    @pytest.mark.parametrize(
        ("norm", "rotation", "over_each", "new"),
        diagonal(
            ["", "layer", "behind"],
            [(None, False), (24, False), (8, True)],
            [True, False],
            [ONE, {"counts": (4, 3), "max_tokens": 4}],
        ),
    )
    def test_norms_of_each_head(self, draw, dtype, norm, rotation, over_each, new):
        options = {"norm": norm, "rotary_dim": rotation[0], "interleaved": rotation[1]}
        case = Decodes((9, 3), dim=24, heads=6, over_each=over_each, **options, **new)
        step = Step(draw, dtype, case)
        step.heads += 0.5
        step.check()

    @pytest.mark.parametrize(
        ("rotation", "new"),
        diagonal([(24, False), (8, True)], [ONE, {"counts": (4, 3), "max_tokens": 4}]),
    )
    def test_norms_with_a_bias(self, draw, dtype, rotation, new):
        options = {"norm": "bias", "rotary_dim": rotation[0], "interleaved": rotation[1]}
        step = Step(draw, dtype, Decodes((9, 3), dim=24, heads=6, **options, **new))
        step.heads += 0.5
        step.check()

    @pytest.mark.parametrize(
        ("all_heads", "max_tokens", "splits"),
        each_once([(1, 1), (3, 3), (6, 2), (40, 40), (40, 8)], [1, 3, MAX_TOKENS], [1, 2]),
    )
    def test_norms_of_groups_of_heads(self, draw, dtype, all_heads, max_tokens, splits):
        """One chunk of the heads side by side, a part of one, and several."""
        heads, kv_heads = all_heads
        block_m = max(16, next_power_of_two(heads // kv_heads * max_tokens))
        config, shape = replace(SMALL, block_m=block_m), (max_tokens, heads, kv_heads, 128)
        options = {"norm": "", "over_row": True, "num_splits": splits, "config": config}
        options["loads_first"] = splits > 1
        Step(draw, dtype, Decodes((90, 33), (max_tokens, 1), *shape, **options)).check()

    @pytest.mark.parametrize(
        ("feature", "splits", "new"), diagonal(list(FEATURES), [1, 4], [ONE, SEVERAL])
    )
    def test_gates(self, draw, dtype, feature, splits, new):
        options = {"gated": True, "num_splits": splits, "padding": 2, **FEATURES[feature]}
        Step(draw, dtype, Decodes(**options, **new)).check()

    @pytest.mark.parametrize(
        ("dim", "all_heads", "max_tokens"),
        diagonal([24, 256], [(3, 3), (6, 2), (16, 1)], [1, 2, 5]),
    )
    def test_gates_of_groups_of_heads(self, draw, dtype, dim, all_heads, max_tokens):
        """A context of one part and one of several, whose heads are joined in groups."""
        heads, kv_heads = all_heads
        config = replace(SMALL, block_m=max(16, next_power_of_two(heads // kv_heads * max_tokens)))
        shape = (max_tokens, 1), max_tokens, heads, kv_heads, dim
        options = {"gated": True, "norm": "", "num_splits": 4, "config": config}
        contexts = 18, 16 * config.block_m + 20
        Step(draw, dtype, Decodes(contexts, *shape, **options)).check()

    @pytest.mark.parametrize("new", [ONE, SEVERAL])
    @pytest.mark.parametrize("splits", [1, 4])
    def test_gates_multiply_what_would_be_stored(self, draw, dtype, splits, new):
        """The result without gates, their sigmoids and the products are rounded."""
        step = Step(draw, dtype, Decodes(gated=True, num_splits=splits, **new))
        gates, step.gates = step.gates, None
        want = step.run() * gates.sigmoid()
        step.out, step.gates = torch.empty_like(want), gates
        limits = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
        assert_close(step.run(), want, 0.0, limits[dtype])  # a sigmoid's next number

    @pytest.mark.parametrize("max_tokens", [1, 2, 5])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (16, 1)])
    @pytest.mark.parametrize("splits", [1, 2])
    def test_groups_of_heads(self, draw, dtype, heads, kv_heads, splits, max_tokens):
        counts = (max_tokens, -(-max_tokens // 2))
        config = replace(SMALL, block_m=max(16, next_power_of_two(heads // kv_heads * max_tokens)))
        shape = counts, max_tokens, heads, kv_heads
        contexts = 18, 4 * config.block_m + 20
        Step(draw, dtype, Decodes(contexts, *shape, config=config, num_splits=splits)).check()

    @pytest.mark.parametrize("max_tokens", [1, 3])
    @pytest.mark.parametrize("dim", [64, 80, 128])
    def test_head_sizes(self, draw, dtype, dim, max_tokens):
        config, counts = replace(SMALL, tile=32), (max_tokens, 1)
        case = Decodes((70, 5), counts, max_tokens, dim=dim, rotary_dim=dim, config=config)
        Step(draw, dtype, case).check()

    @pytest.mark.parametrize("count", [2, 9, MAX_TOKENS])
    @pytest.mark.parametrize("splits", [1, 8])
    def test_numbers_of_tokens(self, draw, dtype, splits, count):
        """Of the most tokens, of one less, and of one, behind contexts with several parts."""
        config, counts = replace(SMALL, block_m=32), (count, count - 1, 1, count)
        contexts = (700, 300, 150, count)
        case = Decodes(contexts, counts, count, config=config, num_splits=splits)
        Step(draw, dtype, case).check()

    @pytest.mark.parametrize("window", [1, 2, 4, 21, Chunk(1), Chunk(4), Chunk(21)])
    @pytest.mark.parametrize("splits", [1, 2])
    def test_windows_within_the_new_tokens(self, draw, dtype, splits, window):
        case = Decodes((6, 90, 18), (6, 7, 1), 8, window=window, num_splits=splits)
        Step(draw, dtype, case).check()

    @pytest.mark.parametrize("new", [ONE, {"counts": (3, 5), "max_tokens": 6}])
    @pytest.mark.parametrize("splits", [1, 2])
    def test_padding_is_skipped(self, draw, dtype, splits, new):
        Step(draw, dtype, Decodes((9, 5), num_splits=splits, padding=3, **new)).check()

    @pytest.mark.parametrize("new", [ONE, {"counts": (4, 2), "max_tokens": 4}])
    @pytest.mark.parametrize("splits", [2, 8])
    def test_a_second_launch_finds_its_counters(self, draw, dtype, splits, new):
        step = Step(draw, dtype, Decodes((140, 33), num_splits=splits, **new))
        first = step.check().clone()
        assert torch.equal(step.run(), first)

    @pytest.mark.parametrize("new", [ONE, {"counts": (4, 2, 3), "max_tokens": 4}])
    def test_parts_fill_the_memory_of_their_tokens(self, draw, dtype, new):
        """No two parts share memory, though the interpreter would find out only if it ran them at
        the same time."""
        step = Step(draw, dtype, Decodes((150, 300, 140), num_splits=2, **new))
        step.check()
        for part in (step.scratch.sums, step.scratch.stats):
            assert not part[: step.case.tokens].isnan().any()
            assert part[step.case.tokens :].isnan().all()

    @pytest.mark.parametrize("new", [ONE, SEVERAL])
    @pytest.mark.parametrize("splits", [1, 2])
    @pytest.mark.parametrize("feature", [{}, {"norm": "", "over_row": True, "gated": True}])
    def test_a_requests_bits_do_not_depend_on_the_batch(self, draw, dtype, feature, splits, new):
        step = Step(draw, dtype, Decodes(num_splits=splits, window=20, **feature, **new))
        whole, starts = step.run().clone(), step.starts.tolist()
        for index in range(len(CONTEXTS)):
            own = {"contexts": CONTEXTS[index : index + 1]}
            own["counts"] = step.case.counts_of_all[index : index + 1]
            alone = Step(draw, dtype, replace(step.case, **own))
            tokens = slice(*starts[index : index + 2])
            alone.cache, alone.table = step.cache, step.table[index : index + 1]
            alone.slots, alone.heads = step.slots[tokens], step.heads[tokens]
            alone.cos, alone.sin = step.cos[tokens], step.sin[tokens]
            alone.norms, alone.gates = (
                step.norms,
                None if step.gates is None else step.gates[tokens],
            )
            assert torch.equal(alone.run(), whole[tokens])

    @pytest.mark.parametrize(
        ("feature", "splits", "new"),
        each_once([*FEATURES, "row norms", "float8"], [1, 4], [ONE, SEVERAL]),
    )
    def test_keys_and_values_of_an_earlier_layer(self, draw, dtype, feature, splits, new):
        """The bits are those of the launch that has written them, and nothing is written."""
        others = {"row norms": {"norm": "", "over_row": True}, "float8": {"has_float8": True}}
        options = {"num_splits": splits, "loads_first": splits > 1, "padding": 2}
        step = Step(draw, dtype, Decodes(**options, **new, **(FEATURES | others)[feature]))
        first, cache = step.run()[: step.case.tokens].clone(), step.cache.clone()
        step.heads = step.heads[:, : step.case.heads]
        if step.norms is not None:
            step.norms = step.norms._replace(key=None)
        step.out.fill_(torch.nan)
        got = step.run()
        assert torch.equal(got[: step.case.tokens], first)
        assert got[step.case.tokens :].isnan().all(), "a padded token was written"
        integers = torch.uint8 if cache.element_size() == 1 else torch.int16
        assert torch.equal(step.cache.view(integers), cache.view(integers))

    def test_more_tokens_than_rows_are_refused(self, draw, dtype):
        with pytest.raises(AssertionError, match="too small"):
            Step(draw, dtype, Decodes((20,), (9,), 9)).run()
