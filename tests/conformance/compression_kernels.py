"""The kernels of compressed attention equal the references, in steps of any sizes; unused rows of
the cache are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from conformance.attention_kernels import tolerances
from conformance.indexer_kernels import angles, integers
from support.kernel_helpers import assert_close, poisoned
from support.variants import slow

from shmllm_kernels.gpu import last_rotated
from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.compression import CacheRows, Made, compress
from shmllm_kernels.gpu.configs import AttentionConfig
from shmllm_kernels.gpu.indexer import RequestTables
from shmllm_kernels.gpu.latent_attention import paged_latent_attention
from shmllm_kernels.gpu.listed_keys import Entries, Pages, Scored, list_keys, unit_of
from shmllm_kernels.reference import compression as plain
from shmllm_kernels.reference import last_rotated as plain_rotated

EPS, PADDING = 1e-3, 2
LENGTHS = (37, 1, 70)
MIXED = ((5, 37), (1, 1), (37, 70))
"""For each request, the tokens in the step and the context length."""


@dataclass(frozen=True)
class Case:
    """The shapes of a layer."""

    block_size: int = 16
    rate: int = 4
    overlaps: bool = True
    dim: int = 24
    rope_dim: int = 8

    @property
    def width(self) -> int:
        return self.dim * (1 + self.overlaps)


class Layer:
    """The cache of a layer, in shuffled blocks of two tables: what tokens have contributed, and
    room for entries, or entries with keys of an indexer beside them, all one behind the other in
    one buffer."""

    def __init__(self, draw, dtype, case: Case, index_dim: int = 0) -> None:
        self.case, self.draw, self.device = case, draw, draw.device
        counts = [-(-length // case.block_size) for length in LENGTHS]
        num_blocks, per_block = sum(counts) + 2, -(-case.block_size // case.rate)
        sizes = [case.block_size * case.dim, per_block * (case.dim + index_dim)]
        self.flat = poisoned(num_blocks * sum(sizes), dtype=dtype, device=draw.device)
        keys, entries = self.flat.split([num_blocks * size for size in sizes])
        self.keys = keys.view(num_blocks, case.block_size, case.dim)
        of_entries = entries.view(num_blocks, -1).split(
            [per_block * case.dim, per_block * index_dim], 1
        )
        self.entries, self.index = (each.unflatten(1, (per_block, -1)) for each in of_entries)
        self.tables = []
        for _ in range(2):
            order = draw.permutation(num_blocks).int().cpu()
            table = torch.full((len(LENGTHS) + PADDING, max(counts)), 2**30, dtype=torch.int32)
            for row, own in zip(table, order[: sum(counts)].split(counts), strict=False):
                row[: len(own)] = own
            self.tables.append(table.to(draw.device))

    def tables_of(self, step) -> RequestTables:
        counts = [count for count, _ in step] + [0] * PADDING
        contexts = [context for _, context in step] + [0] * PADDING
        starts = torch.tensor([0, *counts]).cumsum(0)
        rest = (torch.as_tensor(each, dtype=torch.int32) for each in (starts, contexts))
        return RequestTables(self.tables[0], *(each.to(self.device) for each in rest))

    def places(self, request: int, positions, part: int = 0):
        """The block and the row of positions, or of entries."""
        size, rate = self.case.block_size, self.case.rate if part else 1
        index = ((positions + 1) * rate - 1) // size
        blocks = self.tables[part][request].cpu().long()[index]
        return blocks, positions - index * size // rate

    def offsets(self, request: int, positions, part: int = 0) -> list[int]:
        """Where keys or entries begin in the buffer."""
        rows = self.entries if part else self.keys
        blocks, at = self.places(request, positions, part)
        first = rows.storage_offset() + blocks * rows.stride(0) + at * rows.stride(1)
        return first.tolist()

    def pages(self) -> list[Pages]:
        return [
            Pages(each.storage_offset(), *each.stride()[:2]) for each in (self.keys, self.entries)
        ]


class CompressionConformance:
    @pytest.mark.parametrize("eps", [None, EPS])
    @pytest.mark.parametrize("shape", [(3, 6, 24, 8), (2, 4, 16, 16), (0, 1, 8, 4)])
    def test_last_elements_of_heads_rotate_and_back(self, draw, dtype, shape, eps):
        tokens, heads, dim, rope_dim = shape
        x = draw.normal(tokens, heads + 1, dim, dtype=dtype, scale=3.0)[:, :heads]
        cos, sin = angles(draw, tokens, rope_dim, dtype)
        wide = [each.float() for each in (cos, sin)]
        want = plain_rotated.rotate_heads(x.float(), *wide, eps).to(dtype)
        last_rotated.rotate_heads(x, cos, sin, eps)
        assert_close(x, want, *tolerances(dtype))
        want = plain_rotated.rotate_heads(x.float(), *wide, is_back=True).to(dtype)
        last_rotated.rotate_heads(x, cos, sin, is_back=True)
        assert_close(x, want, *tolerances(dtype))

    @pytest.mark.parametrize(("dim", "rope_dim"), [(24, 8), (10, 4)])
    def test_keys_and_parts_are_stored(self, draw, dtype, dim, rope_dim):
        x, weight = draw.normal(7, dim, dtype=dtype, scale=3.0), draw.normal(dim, dtype=dtype)
        rest = weight, EPS, *angles(draw, 7, rope_dim, dtype)
        slots = torch.tensor([3, -1, 17, 0, 9, 22, -1], device=draw.device)
        found, want, rows = (poisoned(3, 8, dim, dtype=dtype, device=draw.device) for _ in range(3))
        last_rotated.store_keys(found, x, *rest, slots)
        plain_rotated.store_keys(want, x, *rest, slots)
        assert torch.equal(found.isnan(), want.isnan())
        assert_close(found.nan_to_num(), want.nan_to_num(), *tolerances(dtype))
        last_rotated.store_rows(rows, x, slots)
        assert torch.equal(rows.isnan(), want.isnan())
        assert torch.equal(rows.flatten(0, 1)[slots[slots >= 0]], x[slots >= 0])

    @pytest.mark.parametrize(
        "case",
        [
            Case(),
            Case(rate=8, overlaps=False),
            Case(block_size=8, rate=16, overlaps=False, dim=10, rope_dim=4),
            slow(Case(block_size=8, rate=6, dim=40, rope_dim=40)),
        ],
    )
    def test_entries_are_those_of_the_reference_in_any_steps(self, draw, dtype, case):
        """Windows end in other steps than they begin in. The bits do not depend on that."""
        first, columns = 3, 2 * case.width + 5
        parts = [draw.normal(length, columns, dtype=dtype) for length in LENGTHS]
        bias = draw.normal(case.rate, case.width)
        weight = draw.normal(case.dim, dtype=dtype)
        tables = angles(draw, max(LENGTHS), case.rope_dim, dtype)
        found = []
        for sizes in (LENGTHS, (5, 1, 9)):
            layer = Layer(draw, dtype, case)
            num_blocks = len(layer.keys)
            rows = poisoned(num_blocks, case.block_size, columns, dtype=dtype, device=draw.device)
            done = [0] * len(LENGTHS)
            while done != [*LENGTHS]:
                counts = [
                    min(size, length - at)
                    for size, length, at in zip(sizes, LENGTHS, done, strict=True)
                ]
                positions = [
                    torch.arange(at, at + count) for at, count in zip(done, counts, strict=True)
                ]
                for request, own in enumerate(positions):
                    rows[layer.places(request, own)] = parts[request][own]
                done = [at + count for at, count in zip(done, counts, strict=True)]
                of_requests = layer.tables_of([*zip(counts, done, strict=True)])
                at = torch.cat(positions) // case.rate * case.rate
                own = CacheRows(layer.entries, layer.tables[1]), CacheRows(rows, layer.tables[0])
                rest = bias, weight, EPS, *(each[at] for each in tables), *of_requests[1:]
                compress(*own, Made(case.rate, case.overlaps, first), *rest)
            found.append(
                [
                    layer.entries[layer.places(request, torch.arange(length // case.rate), 1)]
                    for request, length in enumerate(LENGTHS)
                ]
            )
            assert (~layer.entries.isnan()).any(-1).sum() == sum(n // case.rate for n in LENGTHS)
        for request, (whole, pieces) in enumerate(zip(*found, strict=True)):
            assert torch.equal(whole, pieces)
            values, gates = parts[request][:, first:].float().split([case.width] * 2 + [2], 1)[:2]
            at = slice(0, len(values) // case.rate * case.rate, case.rate)
            rest = (each.float() for each in (bias, weight))
            own = (each[at].float() for each in tables)
            want = plain.make_entries(values, gates, *rest, EPS, *own)
            assert_close(whole, want.to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize(
        ("case", "window", "top_k", "rows"),
        [
            (Case(), 7, 5, 10),
            (Case(rate=8, overlaps=False), 20, 0, 1),
            (Case(rate=0, overlaps=False), 7, 0, 1),
            slow(Case(block_size=8, rate=6), 100, 3, 50),
        ],
    )
    def test_lists_have_a_window_and_entries(self, draw, dtype, case, window, top_k, rows):
        """Whole numbers make many ties, of which the first are chosen."""
        heads, dim, rate = 4, 32, case.rate
        layer = Layer(draw, dtype, case if rate else replace(case, rate=1), dim)
        num_tokens = sum(count for count, _ in MIXED) + PADDING
        query, weights = (
            integers(draw, num_tokens, heads, dim, dtype=dtype),
            integers(draw, num_tokens, heads, dtype=dtype),
        )
        layer.index.copy_(integers(draw, *layer.index.shape, dtype=dtype))
        cos = torch.ones(num_tokens, 8, dtype=dtype, device=draw.device)
        scored = Scored(query, weights, layer.index, cos, torch.zeros_like(cos))
        most = top_k or (max(LENGTHS) // rate if rate else 0)
        listed, starts, lens = (
            torch.full(shape, -7, dtype=torch.int32, device=draw.device)
            for shape in ((num_tokens, window + most), (num_tokens + 1,), (num_tokens,))
        )
        columns = max(LENGTHS) // (rate or 1)
        scores = poisoned(rows, columns, dtype=torch.float32, device=draw.device)
        keys, entries = layer.pages()
        unit = unit_of(keys, entries)
        own = layer.tables[1], rate, most, scored if top_k else None
        list_keys(
            listed, starts, lens, scores, layer.tables_of(MIXED), keys.over(unit), window,
            layer.case.block_size, Entries(entries.over(unit), *own) if rate else None,
        )  # fmt: skip
        assert starts.tolist() == [*range(num_tokens - 1), *[num_tokens - PADDING] * PADDING]
        token = 0
        for request, (count, context) in enumerate(MIXED):
            for position in range(context - count, context):
                own = None
                if top_k:
                    of_entries = layer.index[
                        layer.places(request, torch.arange((position + 1) // rate), 1)
                    ]
                    products = (query[token].double() @ of_entries.double().T).clamp(min=0)
                    own = weights[token].double() @ products
                positions, chosen = plain.list_keys(position, window, rate, own, most)
                want = layer.offsets(request, torch.tensor(positions))
                want += layer.offsets(request, torch.tensor(chosen, dtype=torch.int64), 1)
                assert lens[token] == len(want)
                assert (listed[token, : len(want)] * unit).tolist() == want
                assert (listed[token, len(want) :] == -7).all(), "it wrote more than it chose"
                token += 1
        assert lens[token:].tolist() == [0] * PADDING

    @pytest.mark.parametrize("splits", [1, 2])
    def test_attention_reads_what_is_listed(self, draw, dtype, splits):
        """A key is its own value, and a sink is one more key."""
        tokens, heads, dim, unit, count = 5, 4, 24, 8, 40
        flat = poisoned(unit * 200, dtype=dtype, device=draw.device)
        places = torch.stack([draw.permutation(60)[:count] for _ in range(tokens)]).int() * 3
        for place in places.flatten().unique().tolist():
            flat[place * unit : place * unit + dim] = draw.normal(dim, dtype=dtype)
        lens = torch.tensor([1, 40, 17, 33, 0], dtype=torch.int32, device=draw.device)
        starts = torch.tensor([0, 1, 2, 3, 4, 4], dtype=torch.int32, device=draw.device)
        query, sinks = draw.normal(tokens, heads, dim, dtype=dtype), draw.normal(heads)
        scratch = None
        if splits > 1:
            scratch = AttentionScratch.allocate(tokens, heads, splits, dim, draw.device)
        out = query.clone()
        paged_latent_attention(
            out, out, out[..., :0], flat.unfold(0, dim, unit)[:, None], places, starts, lens,
            AttentionConfig(16, 16, 4, 2), 0.17, splits, scratch, has_slots=True, sinks=sinks,
        )  # fmt: skip
        for token in range(tokens - 1):
            rows = [flat[place * unit :][:dim].float() for place in places[token, : lens[token]]]
            keys = torch.stack(rows)
            scores = torch.cat([query[token].float() @ keys.T * 0.17, sinks[:, None]], 1)
            want = scores.softmax(1)[:, :-1] @ keys
            assert_close(out[token], want.to(dtype), *tolerances(dtype))
