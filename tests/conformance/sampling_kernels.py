"""The tests of the sampling kernels: they equal a reference that sorts, in mixed batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.kernel_helpers import poisoned
from support.variants import slow

from shmllm_kernels.gpu import noise, sampling, sampling_scratch
from shmllm_kernels.gpu.logits_processors import add_biases, count_tokens
from shmllm_kernels.gpu.noise import gumbel_of_entries, gumbel_of_range
from shmllm_kernels.gpu.sampling import DraftedTokens, SamplingScratch, TokenMasks, sample
from shmllm_kernels.gpu.scoring import Scores, score
from shmllm_kernels.reference import sampling as plain
from shmllm_kernels.reference.philox import gumbel_noise
from shmllm_kernels.reference.sampling import SamplingColumns

CLOSE = 1e-4
"""Sums of logit and noise that differ by less than this may be in either order."""
ON_THE_EDGE = 1e-5
"""An entry whose probability differs by less than this from a filter's bound may be kept or not."""

PARAMETERS = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k above all": {"temperature": 0.8, "top_k": 2**31 - 1},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-6},
    "nearly all": {"temperature": 1.0, "top_p": 0.9999},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "top_k and top_p": {"temperature": 1.2, "top_k": 40, "top_p": 0.7},
    "min_p and top_p": {"temperature": 1.0, "min_p": 0.02, "top_p": 0.9},
    "min_p below top_k": {"temperature": 1.0, "min_p": 0.5, "top_k": 300},
    "all": {"temperature": 0.7, "min_p": 0.01, "top_k": 100, "top_p": 0.95},
}
SEARCHED = {
    "top_k": {"temperature": 1.0, "top_k": 300},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 1e-3},
    "top_k and top_p": {"temperature": 0.9, "top_k": 400, "top_p": 0.97},
    "top_k and tiny top_p": {"temperature": 0.9, "top_k": 400, "top_p": 1e-6},
    "top_k below min_p": {"temperature": 1.0, "top_k": 300, "min_p": 0.6},
    "min_p below top_k": {"temperature": 1.0, "top_k": 200, "min_p": 0.05, "top_p": 0.5},
    "min_p and top_p": {"temperature": 1.1, "min_p": 0.02, "top_p": 0.999},
    "all": {"temperature": 0.8, "min_p": 0.5, "top_k": 350, "top_p": 0.95},
}
"""Filters that keep more entries than a list of 16 holds."""
WIDE = {
    "top_k": {"temperature": 1.0, "top_k": 3000},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "all": {"temperature": 0.8, "min_p": 0.01, "top_k": 2800, "top_p": 0.95},
}
"""Filters that keep more entries than a list holds."""


@triton.jit
def _gumbel_of_bits(out_ptr, bits_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    bits = tl.load(bits_ptr + places).to(tl.uint32)
    tl.store(out_ptr + places, noise._gumbel(bits))


@triton.jit
def _noise(out_ptr, other_ptr, seed_ptr, position_ptr, first, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    tl.store(out_ptr + places, gumbel_of_range(seed, position, first, SIZE))
    tl.store(other_ptr + places, gumbel_of_entries(seed, position, first + places))


@pytest.fixture
def short_lists(monkeypatch):
    """Lists of 16 candidates, so that rows of a few hundred entries have to search."""
    for module in (sampling, sampling_scratch):
        monkeypatch.setattr(module, "CAPACITY", 16)


def make_columns(device, *rows, seeds=None) -> SamplingColumns:
    columns = SamplingColumns.greedy(len(rows), device)
    for index, options in enumerate(rows):
        for name, value in options.items():
            getattr(columns, name)[index] = value
    if seeds is not None:
        columns.seeds.copy_(seeds)
    return columns


class Step:
    """One call of the sampler, with random seeds and positions, and rows in random order."""

    def __init__(self, draw, logits, *parameters, chunk=256) -> None:
        self.draw, self.device, self.logits = draw, draw.device, logits
        num_rows, vocab_size = logits.shape
        seeds = draw.integers(-(2**63), 2**63 - 1, len(parameters))
        self.columns = make_columns(draw.device, *parameters, seeds=seeds)
        self.rows = draw.permutation(len(parameters))[:num_rows].int()
        self.positions = draw.integers(0, 2**31 - 1, num_rows)
        self.scratch = SamplingScratch.allocate(num_rows, vocab_size, draw.device, chunk)
        for name in SamplingScratch.__slots__[1:]:
            part = getattr(self.scratch, name)
            part.fill_(math.nan if part.is_floating_point() else 2**30)
        self.uses = None
        self.masks = None

    def run(self, keeps_processed=False) -> torch.Tensor:
        tokens = poisoned(len(self.rows), dtype=torch.int64, device=self.device)
        last_tokens = poisoned(len(self.columns.seeds), dtype=torch.int64, device=self.device)
        before, wanted = self.logits.clone(), last_tokens.clone()
        sample(
            tokens,
            self.logits,
            self.rows,
            self.positions,
            self.columns,
            self.scratch,
            self.uses,
            self.masks,
            keeps_processed,
            self.num_searches(),
            last_tokens,
        )
        torch.testing.assert_close(self.logits, before, atol=0, rtol=0, equal_nan=True)
        wanted[self.rows[self.rows >= 0].long()] = tokens[self.rows >= 0]
        assert last_tokens.tolist() == wanted.tolist()
        return tokens

    def num_searches(self) -> int | None:
        columns = self.columns
        cuts = (columns.top_k > 0) & (columns.top_k < self.logits.shape[1])
        searches = cuts.int() + (columns.top_p < 1).int()
        is_filtered = (columns.temperature > 0) & ((searches > 0) | (columns.min_p > 0))
        return int(searches[is_filtered].max()) if is_filtered.any() else None

    def row_columns(self) -> SamplingColumns:
        rows = self.rows.long()
        names = SamplingColumns.__slots__
        return SamplingColumns(*(getattr(self.columns, name)[rows] for name in names))

    def edited(self) -> torch.Tensor:
        """The logits after the masks and penalties of the reference."""
        logits = self.logits.float()
        if self.masks is not None:
            bits = (self.masks.words[:, :, None] >> torch.arange(32, device=self.device)) & 1
            allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
            chosen = self.masks.rows.long()
            forbidden = ~allowed[chosen.clamp(min=0)] & (chosen >= 0)[:, None]
            logits = logits.masked_fill(forbidden, -torch.inf)
        if self.uses is not None:
            logits = plain.penalise(logits, self.uses[self.rows.long()], self.row_columns())
        return logits

    def check(self) -> torch.Tensor:
        """Compare the kept entries and the token with the reference."""
        tokens = self.run(keeps_processed=True)
        columns, edited = self.row_columns(), self.edited()
        want = plain.sample(edited, self.positions, columns)
        processed = self.scratch.processed_logits
        for index in range(len(tokens)):
            if columns.temperature[index] == 0:
                assert tokens[index] == want[index]
                continue
            own = SamplingColumns(
                *(getattr(columns, name)[index : index + 1] for name in SamplingColumns.__slots__)
            )
            is_exact = check_kept(processed[index], edited[index : index + 1], own)
            sums = noisy(plain.filtered(edited[index : index + 1], own), self.positions[index], own)
            best = sums.topk(min(2, len(sums))).values
            if is_exact and (len(best) < 2 or best[0] - best[1] > CLOSE):
                assert tokens[index] == want[index]
        return tokens


def noisy(kept, position, columns):
    gumbel = gumbel_noise(columns.seeds.cpu().numpy(), np.array([int(position)]), kept.shape[1])
    return kept[0].cpu() + torch.from_numpy(gumbel[0])


def check_kept(got, logits, columns) -> bool:
    """Compare the entries that a row's filters keep. Entries at a filter's bound may differ; the
    result says whether none does."""
    want = plain.filtered(logits, columns)[0]
    differs = (got == -torch.inf) != (want == -torch.inf)
    both = ~differs & (want > -torch.inf)
    torch.testing.assert_close(got[both], want[both], atol=1e-6, rtol=1e-5)
    if not differs.any():
        return True
    scaled = (logits[0] / columns.temperature[0]).double()
    near_floor = (scaled - scaled.max() - columns.min_p[0].double().log()).abs() < ON_THE_EDGE
    whole = plain.filtered(logits, _without_top_p(columns))[0].double()
    order = whole.sort(descending=True, stable=True).indices
    before = torch.empty_like(whole)
    probabilities = whole.softmax(0)[order]
    before[order] = probabilities.cumsum(0) - probabilities
    near_mass = (before - columns.top_p[0]).abs() < ON_THE_EDGE
    near_mass &= (whole > -torch.inf) & (columns.top_p[0] < 1)
    assert (near_floor | near_mass)[differs].all(), "another set of entries is kept"
    return False


def _without_top_p(columns):
    values = {name: getattr(columns, name) for name in SamplingColumns.__slots__}
    return SamplingColumns(**values | {"top_p": torch.ones_like(columns.top_p)})


class SamplingConformance:
    @pytest.mark.parametrize("first", [0, 4, 1000])
    def test_noise_equals_the_references(self, draw, device, first):
        seed, position = draw.integers(-(2**63), 2**63 - 1, 1), draw.integers(0, 2**31 - 1, 1)
        out, other = (poisoned(64, dtype=torch.float32, device=device) for _ in range(2))
        _noise[(1,)](out, other, seed, position, first, SIZE=64)
        want = gumbel_noise(seed.cpu().numpy(), position.cpu().numpy(), first + 64)[0, first:]
        torch.testing.assert_close(out.cpu(), torch.from_numpy(want), atol=2e-6, rtol=2e-6)
        assert torch.equal(out, other)

    def test_noise_is_exact_at_both_ends(self, device):
        bits = [0, 1, 2, 3, 1000, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 257, 2**32 - 2, 2**32 - 1]
        bits += [2**power for power in range(4, 25)]
        uniform = (np.array(bits, np.float64) + 0.5) / 2**32
        want = torch.from_numpy(-np.log(-np.log1p(-uniform)).astype(np.float32))
        out = poisoned(len(bits), dtype=torch.float32, device=device)
        _gumbel_of_bits[(1,)](out, torch.tensor(bits, device=device), SIZE=len(bits))
        torch.testing.assert_close(out.cpu(), want, atol=2e-6, rtol=2e-6)

    @pytest.mark.parametrize("vocab_size", [1, slow(5), slow(256), 1000])
    def test_a_batch_of_mixed_parameters(self, draw, vocab_size):
        logits = draw.normal(len(PARAMETERS), vocab_size, scale=3.0)
        Step(draw, logits, *PARAMETERS.values()).check()

    def test_half_precision_logits(self, draw, dtype):
        logits = draw.normal(4, 300, dtype=dtype, scale=3.0)
        chosen = [PARAMETERS[name] for name in ("greedy", "drawn", "top_k", "top_p")]
        Step(draw, logits, *chosen).check()

    @pytest.mark.parametrize("spread", [0.01, slow(0.5)])
    def test_more_candidates_than_a_short_list_holds(self, draw, spread):
        names = ["top_k", "top_p", "nearly all", "min_p", "all"]
        step = Step(
            draw,
            draw.normal(len(names), 3000, scale=spread),
            *(PARAMETERS[name] for name in names),
            chunk=1024,
        )
        step.check()
        assert (step.scratch.num_candidates == -1).any()

    @pytest.mark.parametrize("step_size", [0.0, slow(0.01)])
    def test_searched_thresholds(self, draw, short_lists, step_size):
        logits = draw.normal(len(SEARCHED), 700, scale=0.2)
        if step_size:  # many entries are equal, as in half precision
            logits = (logits / step_size).round() * step_size
        logits[:, ::9] = -torch.inf
        step = Step(draw, logits, *SEARCHED.values())
        step.check()
        assert (step.scratch.num_candidates == -1).all()

    def test_searches_beside_lists(self, draw, short_lists):
        logits = draw.normal(len(PARAMETERS), 600, scale=1.5)
        step = Step(draw, logits, *PARAMETERS.values())
        step.check()
        assert (step.scratch.num_candidates == -1).any()
        assert (step.scratch.num_candidates > 0).any()

    @pytest.mark.slow
    @pytest.mark.parametrize("vocab_size", [128_256, 151_936])
    def test_searched_thresholds_of_a_whole_vocabulary(self, draw, vocab_size):
        logits = draw.normal(len(WIDE), vocab_size, scale=0.7)
        logits[0] = logits[0].bfloat16().float()
        step = Step(draw, logits, *WIDE.values(), chunk=8192)
        step.check()
        assert (step.scratch.num_candidates == -1).all()

    def test_a_search_separates_neighbouring_numbers(self, draw, short_lists):
        """Neighbours that are positive, negative, around 0.5, and on both sides of zero."""
        bits = torch.stack([draw.permutation(300) for _ in range(4)]).int()
        bits += 2**24
        bits[1] -= 2**31
        bits[2] += 0x3F000000
        bits[3, ::2] -= 2**31
        own = {"temperature": 1.0, "top_k": 260}
        step = Step(draw, bits.view(torch.float32), *[own, own | {"top_p": 0.9999}] * 2)
        step.check()
        assert (step.scratch.num_candidates == -1).all()
        by_top_k = step.row_columns().top_p == 1.0
        kept = (step.scratch.processed_logits > -torch.inf).sum(dim=1)
        assert kept[by_top_k].tolist() == [260] * 2

    def test_a_search_keeps_the_first_of_equal_entries(self, draw, short_lists):
        """The last one is the first or the last of a chunk, or between."""
        kept = [1, 255, 256, 257, 512, 700, 1023]
        options = [{"temperature": 1.0, "top_p": count / 1024} for count in kept]
        options[4]["top_k"] = 900
        step = Step(draw, torch.zeros(len(kept), 1024, device=draw.device), *options)
        tokens = step.check()
        assert (step.scratch.num_candidates == -1).all()
        processed = step.scratch.processed_logits
        for index, top_p in enumerate(step.row_columns().top_p.tolist()):
            count = round(top_p * 1024)
            assert (processed[index] > -torch.inf).nonzero()[:, 0].tolist() == list(range(count))
            assert tokens[index] < count

    def test_a_search_keeps_the_first_of_equal_entries_below_larger_ones(self, draw, short_lists):
        logits = torch.zeros(1, 1024, device=draw.device)
        logits[0, 1::4] = 1.0
        top_p = (256 * math.e + 300.5) / (256 * math.e + 768)
        step = Step(draw, logits, {"temperature": 1.0, "top_p": top_p})
        step.check()
        kept = (step.scratch.processed_logits > -torch.inf)[0]
        assert kept[1::4].all()
        zeros = kept[logits[0] == 0]
        assert zeros[:301].all()
        assert not zeros[301:].any()

    def test_a_search_gives_the_same_bits_beside_any_rows(self, draw, short_lists, monkeypatch):
        """The row is alone or beside others, with the launches that it needs or with more, and
        divided among any number of programs."""
        logits = draw.normal(4, 1500, scale=0.2)
        logits[0] = draw.integers(0, 3, 1500).float()
        names = ("top_p", "all", "top_k")
        step = Step(draw, logits, *(SEARCHED[name] for name in names), {"temperature": 1.0})
        tokens = step.run(keeps_processed=True)
        assert (step.scratch.num_candidates == -1).sum() == 3
        for programs in (0, 2048):
            monkeypatch.setattr(sampling, "SEARCH_PROGRAMS", programs)
            for index in range(4):
                alone = Step(draw, logits[index : index + 1], {})
                columns = step.row_columns()
                own = (getattr(columns, name)[index : index + 1] for name in columns.__slots__)
                alone.columns = SamplingColumns(*own)
                alone.rows = torch.zeros_like(alone.rows)
                alone.positions = step.positions[index : index + 1]
                assert alone.run(keeps_processed=True) == tokens[index]
                both = alone.scratch.processed_logits[0], step.scratch.processed_logits[index]
                assert torch.equal(*both)

    def test_ties_at_the_threshold(self, draw):
        logits = draw.integers(0, 4, 6, 600).float()
        logits[:, ::7] *= -0.0
        names = ("top_k", "top_p", "min_p", "top_k and top_p", "all", "nearly all")
        Step(draw, logits, *(PARAMETERS[name] for name in names)).check()

    def test_a_threshold_separates_neighbouring_numbers(self, draw):
        bits = torch.stack([draw.permutation(300) for _ in range(3)]).int()
        bits += 2**24
        bits[1] -= 2**31
        bits[2] += 0x3F000000
        names = ("top_k", "top_k and top_p", "top_k")
        step = Step(draw, bits.view(torch.float32), *(PARAMETERS[name] for name in names))
        step.check()
        kept = (step.scratch.processed_logits > -torch.inf).sum(dim=1)
        by_top_k = step.row_columns().top_k == 7
        assert (kept[by_top_k] == 7).all()

    def test_few_finite_logits(self, draw):
        logits = torch.full((5, 300), -torch.inf, device=draw.device)
        logits[:, 299] = 1.0
        logits[3:, 10:13] = draw.normal(2, 3)
        names = ("greedy", "drawn", "top_k", "top_p", "min_p and top_p")
        tokens = Step(draw, logits, *(PARAMETERS[name] for name in names)).check()
        assert torch.isfinite(logits.gather(1, tokens[:, None])).all()

    def test_a_row_without_finite_logits_gives_a_valid_token(self, draw):
        logits = torch.full((3, 300), -torch.inf, device=draw.device)
        logits[2] = torch.nan
        for name in ("greedy", "drawn", "top_k", "top_p"):
            tokens = Step(draw, logits, *[PARAMETERS[name]] * 3).run()
            assert ((tokens >= 0) & (tokens < 300)).all()

    def test_greedy_sampling_takes_the_first_of_equal_logits(self, draw):
        logits = torch.zeros(3, 700, device=draw.device)
        logits[1, [300, 699]] = 1.0
        logits[2, 699] = 1.0
        step = Step(draw, logits, {}, {}, {})
        assert step.run().tolist() == [0, 300, 699]

    def test_penalties_and_masks(self, draw):
        penalties = [
            {},
            {"repetition": 1.3},
            {"frequency": 0.4, "temperature": 1.0},
            {"presence": -0.7, "temperature": 1.0, "top_k": 5},
            {
                "repetition": 0.7,
                "frequency": 1.0,
                "presence": 1.0,
                "temperature": 0.5,
                "top_p": 0.9,
            },
        ]
        step = Step(draw, draw.normal(5, 333, scale=2.0), *penalties)
        step.uses = torch.zeros(5, 333, dtype=torch.int32, device=draw.device)
        owners = draw.integers(-1, 5, 700, dtype=torch.int32)
        prompt, output = draw.integers(0, 340, 700), draw.integers(0, 40, 700)
        count_tokens(step.uses, owners, prompt, is_prompt=True)
        count_tokens(step.uses, owners, output)
        want = torch.zeros(6, 340, dtype=torch.int32)
        for row, token in zip(owners.tolist(), output.tolist(), strict=True):
            want[row, token] += 2
        want[owners.cpu().long(), prompt.cpu()] |= 1
        assert torch.equal(step.uses.cpu(), want[:5, :333])
        step.check()
        words = draw.integers(-(2**31), 2**31 - 1, 2, 11, dtype=torch.int32)
        mask_rows = torch.tensor([1, -1, 0, 0, 1], dtype=torch.int32, device=draw.device)
        step.masks = TokenMasks(words, mask_rows)
        step.check()

    @pytest.mark.parametrize("is_greedy", [True, False])
    def test_penalties_count_the_drafted_tokens_before_a_sample(self, draw, is_greedy):
        """Rows with equal and unequal drafts, and one without penalties."""
        drawn = {} if is_greedy else {"temperature": 0.8, "top_k": 40}
        penalties = {"repetition": 1.4, "frequency": 0.3, "presence": 0.7}
        step = Step(draw, draw.normal(9, 300), *[penalties | drawn] * 2, drawn)
        step.rows = torch.tensor([1, 1, 1, 1, 0, 0, 0, 2, 2], dtype=torch.int32, device=draw.device)
        step.positions = torch.arange(9, device=draw.device)
        num_drafted = [0, 1, 2, 3, 0, 1, 2, 0, 1]
        tokens = torch.tensor([4, 9, 299, 9, 260, 260, 260, 1, 1], device=draw.device)
        step.uses = draw.integers(0, 3, 3, 300, dtype=torch.int32)
        counts = step.uses[step.rows.long()]
        for row, count in enumerate(num_drafted):
            for place in range(count):
                counts[row, tokens[row - place]] += 2
        edited = plain.penalise(step.logits, counts, step.row_columns())
        want = plain.sample(edited, step.positions, step.row_columns())
        got = poisoned(9, dtype=torch.int64, device=draw.device)
        drafted = torch.tensor(num_drafted, dtype=torch.int32, device=draw.device)
        sample(
            got,
            step.logits,
            step.rows,
            step.positions,
            step.columns,
            step.scratch,
            step.uses,
            keeps_processed=True,
            drafted=DraftedTokens(tokens, drafted),
        )
        assert got.tolist() == want.tolist()
        kept = step.scratch.processed_logits
        expected = edited if is_greedy else plain.filtered(edited, step.row_columns())
        torch.testing.assert_close(kept, expected, atol=1e-6, rtol=1e-6)

    def test_biases(self, draw):
        logits = draw.normal(3, 50)
        rows = torch.tensor([2, 0, -1, 2, 2], dtype=torch.int32, device=draw.device)
        tokens = torch.tensor([49, 0, 3, 7, 7], device=draw.device)
        biases = torch.tensor([1.5, -torch.inf, 9.0, -2.0, 0.5], device=draw.device)
        want = logits.clone()
        want[2, 49] += 1.5
        want[0, 0] = -torch.inf
        want[2, 7] -= 1.5
        add_biases(logits, rows, tokens, biases)
        torch.testing.assert_close(logits, want)

    def test_padded_rows_keep_their_token(self, draw):
        step = Step(draw, draw.normal(3, 300), {}, PARAMETERS["top_k"], PARAMETERS["drawn"])
        expected = step.run()
        step.rows[1] = -1
        step.logits[1] = torch.nan
        tokens = step.run(keeps_processed=True)
        assert tokens[1] == -77
        assert torch.equal(tokens[[0, 2]], expected[[0, 2]])
        assert len(Step(draw, torch.empty(0, 300, device=draw.device), {}).run()) == 0

    def test_a_rows_token_does_not_depend_on_the_batch(self, draw):
        step = Step(draw, draw.normal(15, 700, scale=2.0), *PARAMETERS.values())
        tokens = step.run()
        for index in (1, 6, 13):
            alone = Step(draw, step.logits[index : index + 1], *PARAMETERS.values())
            alone.columns = step.columns
            alone.rows, alone.positions = (
                step.rows[index : index + 1],
                step.positions[index : index + 1],
            )
            assert alone.run() == tokens[index]

    @pytest.mark.slow
    def test_a_whole_vocabulary(self, draw):
        names = ("drawn", "top_p", "all", "top_k", "min_p")
        logits = draw.normal(len(names), 128_256, scale=2.5)
        Step(draw, logits, *(PARAMETERS[name] for name in names), chunk=8192).check()

    @pytest.mark.parametrize("normalise", [True, False])
    @pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (300, 4.0), (2600, 0.01)])
    def test_scores(self, draw, vocab_size, spread, normalise):
        logits = draw.normal(6, vocab_size, scale=spread)
        logits[4] = logits[4].round(decimals=0)
        logits[5, 3:] = -torch.inf
        tokens = draw.integers(0, vocab_size, 6)
        ks = torch.tensor([0, -1, 5, 20, 7, 8], dtype=torch.int32, device=draw.device)
        out = Scores.allocate(6, 20, draw.device)
        for part in (out.tokens, out.top):
            part.fill_(torch.nan)
        out.ranks.fill_(-77)
        scratch = SamplingScratch.allocate(6, vocab_size, draw.device, 1024)
        score(out, logits, tokens, ks, scratch, normalise)
        for index, k in enumerate(ks.tolist()):
            if k < 0:
                assert out.tokens[index].isnan()
                assert out.ranks[index] == -77
                continue
            k = min(k, vocab_size)
            row = slice(index, index + 1)
            want, rank, top, ids = plain.score(logits[row], tokens[row], k, normalise)
            torch.testing.assert_close(out.tokens[row], want, atol=2e-6, rtol=2e-6)
            assert out.ranks[index] == rank[0]
            torch.testing.assert_close(out.top[row, :k], top, atol=2e-6, rtol=2e-6)
            assert out.top_ids[index, :k].tolist() == ids[0].tolist()
            assert out.top[index, k:].isnan().all()

    def test_alternatives_beyond_a_chunk_and_beyond_the_finite_logits(self, draw):
        """The last chunk has two entries, the largest; six others are finite."""
        logits = torch.full((1, 258), -torch.inf, device=draw.device)
        logits[0, 250:] = torch.arange(8.0)
        tokens = torch.tensor([251], device=draw.device)
        ks = torch.tensor([12], dtype=torch.int32, device=draw.device)
        out = Scores.allocate(1, 16, draw.device)
        score(out, logits, tokens, ks, SamplingScratch.allocate(1, 258, draw.device, 256))
        assert out.top_ids[0, :12].tolist() == [*range(257, 249, -1), 0, 1, 2, 3]
        assert out.ranks.tolist() == [7]

    def test_wrong_arguments_are_refused(self, draw):
        step = Step(draw, draw.normal(2, 300), {}, {})
        step.rows = step.rows.long()
        with pytest.raises(AssertionError, match="int32"):
            step.run()
        step = Step(draw, draw.normal(2, 300), {}, {})
        step.scratch = SamplingScratch.allocate(2, 299, draw.device, 256)
        with pytest.raises(AssertionError, match="vocabulary"):
            step.run()
