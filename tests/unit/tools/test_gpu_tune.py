"""The search for better tile sizes: what it covers, and how it chooses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu import search, tune, tune_rows
from gpu.figures import Figures
from gpu.search import Search, searches_of
from gpu.settings import REAL, REHEARSAL
from gpu.write_tiles import TUNING

from shmllm_kernels.gpu import configs, row_configs
from shmllm_kernels.gpu.configs import DEVICE_KEYS
from shmllm_kernels.gpu.row_configs import SingleRowConfig, single_row_config
from shmllm_kernels.gpu.tiles import ANY, Tiles

MODULES = [module for part in TUNING.values() for module in part.arguments]
NOT_MEASURED = {
    "decoder_float32": "float32",
    "few_rows_float32": "float32",
    "latent_float32": "float32",
    "packed_product_float32": "float32",
    "product_float32": "float32",
}
"""The kernels without a search: engines on a GPU have 16-bit dtypes unless a user asks."""
PRESENT, OTHER, LUCKY = (SingleRowConfig(n, 64, 4) for n in (1, 2, 4))


@dataclass
class FakeCase:
    """A case with given times: one for each measurement of a tile, the last one again."""

    times: dict[SingleRowConfig, list[float]]
    name: str = "case"
    calls: float = 0.0
    wrong: tuple[SingleRowConfig, ...] = ()

    def result(self, config: SingleRowConfig) -> torch.Tensor:
        if config not in self.times:
            raise RuntimeError("out of resources")
        return torch.full((4,), math.nan if config in self.wrong else 1.0)

    def seconds(self, config: SingleRowConfig) -> float:
        times = self.times[config]
        return times.pop(0) if len(times) > 1 else times[0]


def measured(*cases: FakeCase) -> dict[str, Any]:
    tiles = Tiles("fake", {(ANY, 64): PRESENT})
    wanted = Search(tiles, 64, lambda settings: cases, [PRESENT, OTHER, LUCKY])
    return search.measure(REHEARSAL, wanted)


def test_every_row_of_the_table_is_searched() -> None:
    found = searches_of(MODULES, REAL)
    places = Counter((each.tiles.kernel, each.size) for each in found)
    assert set(places.values()) == {1}
    known = [
        tiles for tiles in (vars(configs) | vars(row_configs)).values() if isinstance(tiles, Tiles)
    ]
    for tiles in known:
        sizes = {size for key in DEVICE_KEYS for size in tiles.sizes(key)}
        if tiles.kernel not in NOT_MEASURED:
            assert sizes <= {size for kernel, size in places if kernel == tiles.kernel}
    assert {tiles.kernel for tiles in known} >= NOT_MEASURED.keys()


def test_the_candidates_contain_the_present_entries_and_none_twice() -> None:
    for each in searches_of(MODULES, REAL):
        for key in DEVICE_KEYS:
            present = each.present(key)
            found = each.candidates
            assert present in found or present.block_m not in {c.block_m for c in found}, each.name
        assert len(each.candidates) == len(set(each.candidates)), each.name


def test_products_keep_the_rows_of_a_block() -> None:
    for each in searches_of(["tune_products"], REAL):
        rows = {config.block_m for config in each.candidates}
        assert rows == {each.present(key).block_m for key in DEVICE_KEYS}


@pytest.mark.parametrize("kind", tune.TABLES)
def test_every_tile_is_tried_with_one_two_and_three_buffers(kind: str) -> None:
    found = tune.candidates(REAL, kind, 128)
    assert {config.num_stages for config in found} == {3, 5, 7}


def test_a_matrix_is_measured_for_the_entry_that_serves_it() -> None:
    served = {
        (tiles.kernel, size): {(each.model, each.name) for each in own}
        for tiles in (row_configs.SINGLE_ROW, row_configs.SINGLE_ROW_TALL)
        for size, own in tune_rows.by_entry(tiles, tune_rows.matrices_of(REAL)).items()
    }
    assert ("8b", "down") in served["single_row", 16_384]
    assert ("1b", "qkv") in served["single_row", 2048]
    assert ("8b", "head") in served["single_row_tall", 4096]
    assert single_row_config(4096, 14_336) == row_configs.SINGLE_ROW.best(ANY, 16_384)


def test_the_best_candidate_is_measured_again_beside_the_present_entry() -> None:
    times = {PRESENT: [4e-6], OTHER: [3e-6], LUCKY: [1e-6, 5e-6]}
    row = measured(FakeCase(times, calls=2.0))
    assert row["after"] == {"block_n": 4, "block_k": 64, "num_warps": 4}
    assert (row["us_before"], row["us_after"]) == (8.0, 10.0)
    assert row["us"] == {"case": {"1, 64, 4": 4.0, "2, 64, 4": 3.0, "4, 64, 4": 1.0}}
    assert (row["kernel"], row["device"], row["size"]) == ("fake", ANY, 64)


def test_a_wrong_result_and_an_error_exclude_a_candidate(capsys: pytest.CaptureFixture) -> None:
    row = measured(FakeCase({PRESENT: [4e-6], OTHER: [1e-6]}, wrong=(OTHER,)))
    assert row["before"] == row["after"]
    said = capsys.readouterr().out
    assert "the result differs by nan" in said
    assert "RuntimeError: out of resources" in said


def test_without_calls_each_case_counts_alike() -> None:
    long = FakeCase({PRESENT: [100e-6], OTHER: [90e-6], LUCKY: [100e-6]}, name="long")
    short = FakeCase({PRESENT: [1e-6], OTHER: [1.5e-6], LUCKY: [0.5e-6]}, name="short")
    row = measured(long, short)
    assert row["after"]["block_n"] == 4
    assert (row["us_before"], row["us_after"]) == (2.0, 1.5)
    weighted = measured(replace(long, calls=1.0), replace(short, calls=1.0))
    assert weighted["after"]["block_n"] == 2


def test_a_search_that_an_earlier_run_has_done_is_not_repeated(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = searches_of(["tune_rows"], REHEARSAL)
    done = {"kernel": some[0].tiles.kernel, "size": some[0].size}
    figures = Figures(tmp_path / "figures.json")
    figures.put("tiles", {"version": 1, "rows": [done]})
    asked: list[str] = []
    monkeypatch.setattr(search, "compile_ahead", lambda settings, modules, names: None)
    monkeypatch.setattr(search, "measure", lambda settings, each: asked.append(each.name))
    search.run(REHEARSAL, figures, "tune_rows")
    assert asked == [each.name for each in some[1:]]
