"""Making the record, its targets and its tables from the parts' figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu.derived import derive
from gpu.parts import PARTS, select
from gpu.record import make_record, write_record
from gpu.settings import REAL
from gpu.table import REHEARSAL
from gpu.targets import targets


def part(**figures: Any) -> dict[str, Any]:
    return {"status": "ok", "seconds": 1.0, "budget_s": 9.0, "error": None, "figures": figures}


def decode(step_us: float, num_bytes: float) -> dict[str, Any]:
    return {
        "num_steps": 50,
        "step_us": step_us,
        "bytes": num_bytes,
        "tokens_per_s": 1e6 / step_us,
        "host_us": 100.0,
        "unhidden_us": 50.0,
        "unhidden_share": 50.0 / step_us,
    }


@pytest.fixture
def parts() -> dict[str, Any]:
    ours = {"one_s": 0.1, "all_s": 0.5, "first_tokens": [1, 2, 3, 4]}
    theirs = {"one_s": 0.1, "all_s": 2.5, "first_tokens": [1, 2, 3, 5]}
    return {
        "environment": part(
            card={"name": "NVIDIA H200", "driver": "580"},
            versions={"torch": "2.11.0", "posix-ipc": None},
            bandwidth={"copy": 4e12, "read": 4.5e12},
            gemm={"flops_per_s": 8e14},
            launch={"host_us": 3.0},
        ),
        "tests": part(
            kernels={"finished": True, "passed": 9, "failed": 1, "skipped": 0, "failures": [
                {"test": "tests::x", "message": "AssertionError: | 3"}]},
            others={"finished": True, "passed": 2, "failed": 0, "skipped": 0, "failures": []},
        ),
        "engine-8b": part(
            start={"ready_s": 12.0, "num_blocks": 7, "graphs": "51 graphs"},
            decode={"1": decode(4000.0, 14.4e9), "256": decode(20_000.0, 50e9)},
            prefill={"s": 0.2, "flops": 1e14},
            generate={"1": ours},
        ),
        "transformers-8b": part(generate={"1": theirs}),
    }  # fmt: skip


def by_name(parts: dict[str, Any]) -> dict[str, Any]:
    return {target.name: target for target in targets(parts, derive(parts), REAL)}


def test_shares_are_relative_to_the_measured_rates_of_the_card(parts):
    derived = derive(parts)
    assert derived["decode"]["8b"]["1"]["of_copy"] == pytest.approx(14.4e9 / 4e-3 / 4e12)
    assert derived["decode"]["8b"]["1"]["of_read"] == pytest.approx(14.4e9 / 4e-3 / 4.5e12)
    assert derived["prefill"]["8b"]["of_gemm"] == pytest.approx(1e14 / 0.2 / 8e14)
    found = derived["transformers"]["8b"]["eager"]["1"]
    assert found == {"whole": pytest.approx(5.0), "decode": pytest.approx(6.0), "agreed": 0.75}


def test_targets_are_reached_missed_or_unknown(parts):
    found = by_name(parts)
    assert found["Llama-3.1-8B: decode at batch 1, of the roofline"].ok is True
    assert found["Llama-3.1-8B: decode at batch 256, of the roofline"].ok is False
    assert found["Llama-3.1-8B: host time not hidden at batch 256, of a step"].ok is True
    assert found["Llama-3.1-8B: times transformers' generate at batch 1"].ok is True
    assert found["Llama-3.1-8B: times transformers' generate at batch 64"].ok is None
    assert found["Llama-3.2-1B: decode at batch 1, of the roofline"].ok is None
    assert found["GPU tests that fail"].ok is False


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"failed": 0}, 0),
        ({"failed": 0, "finished": False}, None),
        ({"failed": 2, "finished": False}, 2),
    ],
)
def test_zero_failed_tests_count_only_if_all_finished(parts, changes, measured):
    parts["tests"]["figures"]["kernels"] |= changes
    assert by_name(parts)["GPU tests that fail"].measured == measured


def test_if_all_tests_were_skipped_their_target_is_not_measured(parts):
    for group in parts["tests"]["figures"].values():
        group.update(passed=0, failed=0, skipped=9)
    assert by_name(parts)["GPU tests that fail"].measured is None


def test_without_the_rates_of_the_card_no_share_is_measured(parts):
    del parts["environment"]
    assert by_name(parts)["Llama-3.1-8B: decode at batch 1, of the roofline"].measured is None


def test_a_batch_that_never_ran_as_a_whole_is_not_measured(parts):
    parts["engine-8b"]["figures"]["decode"]["256"] = {"num_steps": 0}
    record = make_record(parts, False, 1.0)
    assert record["derived"]["decode"]["8b"]["256"]["of_copy"] is None
    names = {t["name"]: t["ok"] for t in record["targets"]}
    assert names["Llama-3.1-8B: host time not hidden at batch 256, of a step"] is None


def test_the_record_and_its_table(parts, tmp_path):
    parts["engine-1b"] = part() | {"status": "failed", "error": "RuntimeError: no"}
    text = write_record(make_record(parts, False, 99.5), tmp_path)
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["schema"] == 1
    assert record["rehearsal"] is False
    assert set(record["targets"][0]) == {"name", "asked", "sense", "measured", "ok"}
    assert (tmp_path / "gpu-check.md").read_text() == text
    assert "NVIDIA H200" in text.splitlines()[0]
    assert "| Llama-3.1-8B: decode at batch 1, of the roofline | 0.9 | >= 0.85 | yes |" in text
    assert "| Llama-3.2-1B: prefill, of the GEMM rate | not measured | >= 0.6 |" in text
    assert "- `tests::x`: AssertionError: | 3" in text
    assert "| engine-1b | failed | 1 | RuntimeError: no |" in text


def test_a_rehearsal_reaches_and_misses_no_target(parts):
    record = make_record(parts, True, 1.0)
    assert record["rehearsal"] is True
    assert {target["ok"] for target in record["targets"]} == {None}


def test_an_empty_record_has_a_table_and_names_the_rehearsal_first(tmp_path):
    text = write_record(make_record({}, True, 0.0), tmp_path)
    assert text.splitlines()[0] == REHEARSAL
    assert "| GPU tests that fail | not measured | <= 0 | a rehearsal |" in text


def test_parts_are_selected_by_name_in_their_order():
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert [part.name for part in select(["tests", "environment"])] == ["environment", "tests"]
    assert "tune" not in {part.name for part in select([])}
    with pytest.raises(ValueError, match="'engine-2b'; the parts are environment"):
        select(["engine-2b"])
