"""Making the record, its targets and its tables from the parts' figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu import resume
from gpu.derived import derive
from gpu.main import LIMIT_S
from gpu.parts import PARTS, select
from gpu.record import make_record, write_record
from gpu.session import RESERVE_S
from gpu.settings import REAL
from gpu.table import REHEARSAL, markdown
from gpu.targets import targets
from gpu.tests_part import SHARDS


def part(**figures: Any) -> dict[str, Any]:
    return {"status": "ok", "seconds": 1.0, "budget_s": 9.0, "error": None, "figures": figures}


def decode(step_us: float, num_bytes: float) -> dict[str, Any]:
    return {
        "num_steps": 50,
        "step_us": step_us,
        "bytes": num_bytes,
        "tokens_per_s": 1e6 / step_us,
        "host_us": 100.0,
        "waited_us": 50.0,
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
        "tests-attention": part(tests={"finished": True, "passed": 9, "failed": 1, "skipped": 0,
            "failures": [{"test": "tests::x", "message": "AssertionError: | 3"}]}),
        **{f"tests-{name}": part(tests={"finished": True, "passed": 2, "failed": 0, "skipped": 0,
            "failures": []}) for name in ("kernels", "steps", "others")},
        "engine-8b": part(
            start={"ready_s": 12.0, "num_blocks": 7, "graphs": "51 graphs"},
            decode={"1": decode(4000.0, 14.4e9), "256": decode(20_000.0, 50e9)},
            prefill={"s": 0.2, "flops": 1e14},
            profile={"256": {"us_per_step": 9.0, "busy_share": 0.9, "largest_gap_us": 80.0,
                "kernels": []}},
            sampled={"filtered": {"1": {"step_us": 5000.0}, "256": {"num_steps": 0}}},
            sleep={"bytes": 16e9, "sleep_s": 0.8, "wake_s": 1.5},
            generate={"64": ours},
        ),
        "packed": part(linear={"8192 x 2048": {
            "torch.mm": {"1": {"us": 10.0, "bytes_per_s": 3.36e12}},
            "int4": {"1": {"us": 4.0, "bytes_per_s": 2.36e12, "times": 2.5}},
        }}),
        "float8": part(decode={"256": decode(8000.0, 24e9)}),
        "ranks": part(sums={"16": {"us": 5.25, "nccl_us": 21.5}}),
        "transformers-8b": part(generate={"64": theirs}),
    }  # fmt: skip


def by_name(parts: dict[str, Any]) -> dict[str, Any]:
    return {target.name: target for target in targets(parts, derive(parts), REAL)}


def test_shares_are_relative_to_the_measured_rates_of_the_card(parts):
    derived = derive(parts)
    assert derived["decode"]["8b"]["1"]["of_copy"] == pytest.approx(14.4e9 / 4e-3 / 4e12)
    assert derived["decode"]["8b"]["1"]["of_read"] == pytest.approx(14.4e9 / 4e-3 / 4.5e12)
    assert derived["float8"]["256"]["of_copy"] == pytest.approx(24e9 / 8e-3 / 4e12)
    assert derived["prefill"]["8b"]["of_gemm"] == pytest.approx(1e14 / 0.2 / 8e14)
    assert derived["sampled"]["8b"] == {"filtered": {"1": pytest.approx(1.25), "256": None}}
    found = derived["transformers"]["8b"]["eager"]["64"]
    assert found == {"whole": pytest.approx(5.0), "decode": pytest.approx(6.0), "agreed": 0.75}


def test_targets_are_reached_missed_or_unknown(parts):
    found = by_name(parts)
    assert found["Llama-3.1-8B: decode at batch 1, of the copy roofline"].ok is True
    assert found["Llama-3.1-8B: decode at batch 256, of the copy roofline"].ok is False
    assert found["Llama-3.1-8B: prefill of 8,192 tokens, of the GEMM rate"].ok is False
    assert found["Llama-3.1-8B: start with graphs, s"].ok is True
    assert found["Llama-3.1-8B: sleep at level 1, s"].ok is True
    assert found["Llama-3.1-8B: wake up, s"].ok is False
    assert found["Llama-3.1-8B: update of all weights, s"].ok is None
    assert found["Llama-3.1-8B: times transformers' generate at batch 64"].ok is False
    assert found["Llama-3.2-1B: decode at batch 1, of the copy roofline"].ok is None
    assert found["GPU tests that fail"].ok is False
    assert found["the first part, s"].ok is None
    assert by_name(parts | {"first": part() | {"seconds": 59.0}})["the first part, s"].ok is True
    assert by_name(parts | {"first": part() | {"seconds": 61.0}})["the first part, s"].ok is False


def test_the_profile_decides_whether_the_device_is_idle(parts):
    name = "Llama-3.1-8B: the device is idle at batch 256, of a step"
    # The host waits 50 us in each step, and the device is idle all the same.
    assert by_name(parts)[name].measured == pytest.approx(0.1)
    assert by_name(parts)[name].ok is False
    parts["engine-8b"]["figures"]["profile"]["256"]["busy_share"] = 0.98
    assert by_name(parts)[name].ok is True
    del parts["engine-8b"]["figures"]["profile"]
    assert by_name(parts)[name].ok is None


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"failed": 0}, 0),
        ({"failed": 0, "finished": False}, None),
        ({"failed": 2, "finished": False}, 2),
    ],
)
def test_zero_failed_tests_count_only_if_all_finished(parts, changes, measured):
    parts["tests-attention"]["figures"]["tests"] |= changes
    assert by_name(parts)["GPU tests that fail"].measured == measured


def test_zero_failed_tests_count_only_if_all_shards_ran(parts):
    del parts["tests-others"]
    parts["tests-attention"]["figures"]["tests"] |= {"failed": 0}
    assert by_name(parts)["GPU tests that fail"].measured is None


def test_if_all_tests_were_skipped_their_target_is_not_measured(parts):
    for name in SHARDS:
        parts[f"tests-{name}"]["figures"]["tests"].update(passed=0, failed=0, skipped=9)
    assert by_name(parts)["GPU tests that fail"].measured is None


def test_without_the_rates_of_the_card_no_share_is_measured(parts):
    del parts["environment"]
    assert by_name(parts)["Llama-3.1-8B: decode at batch 1, of the copy roofline"].measured is None


def test_a_batch_that_never_ran_as_a_whole_is_not_measured(parts):
    parts["engine-8b"]["figures"]["decode"]["256"] = {"num_steps": 0}
    record = make_record(parts, False, 1.0)
    assert record["derived"]["decode"]["8b"]["256"]["of_copy"] is None
    names = {t["name"]: t["ok"] for t in record["targets"]}
    assert names["Llama-3.1-8B: decode at batch 256, of the copy roofline"] is None


def test_the_record_and_its_table(parts, tmp_path):
    parts["engine-1b"] = part() | {"status": "failed", "error": "RuntimeError: no"}
    text = write_record(make_record(parts, False, 99.5), tmp_path)
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["schema"] == 2
    assert record["rehearsal"] is False
    assert set(record["targets"][0]) == {"name", "asked", "sense", "measured", "ok"}
    assert (tmp_path / "gpu-check.md").read_text() == text
    assert "NVIDIA H200" in text.splitlines()[0]
    assert "| Llama-3.1-8B: decode at batch 1, of the copy roofline | 0.9 | >= 0.85 | yes |" in text
    assert "| Llama-3.2-1B: start with graphs, s | not measured | <= 20 |" in text
    assert "| Llama-3.1-8B | filtered | 1 | 1.25 |" in text
    assert "| Llama-3.1-8B | 16 | 0.8 | 1.5 | not measured |" in text
    assert "| matrix | weights | 1 rows GB/s | 1 rows, times torch |" in text
    assert "| 8192 x 2048 | int4 | 2360 | 2.5 |" in text
    assert "| rows | us | NCCL us |\n| --- | --- | --- |\n| 16 | 5.25 | 21.5 |" in text
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


def test_a_record_that_stopped_says_so_first(parts):
    record = make_record(parts, False, 1.0)
    stopped = {"part": "engine-1b", "status": "failed", "error": "RuntimeError: no"}
    text = markdown(record | {"stopped": stopped, "next": "engine-1b"})
    assert text.splitlines()[0] == "**Stopped at engine-1b: failed: RuntimeError: no**"
    text = markdown(record | {"next": "engine-1b"})
    assert "goes on with engine-1b" in text.splitlines()[0]


def test_parts_are_selected_by_name_in_their_order():
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert [part.name for part in select(["tune", "environment"])] == ["environment", "tune"]
    assert [part.name for part in select(["transformers-1b"])] == ["transformers-1b"]
    assert [part.name for part in select(["tests"])] == [f"tests-{name}" for name in SHARDS]
    assert "engine-4b" not in {part.name for part in select([])}
    with pytest.raises(ValueError, match="'engine-2b'; the parts are first, environment"):
        select(["engine-2b"])


def test_kernels_are_compiled_before_an_engine_is_timed():
    assert [part.name for part in select(["engine-1b"])] == ["compile", "engine-1b"]
    names = [part.name for part in select([])]
    timed = [part.name for part in PARTS if part.needs_kernels and not part.asked_only]
    assert names.index("compile") < min(names.index(name) for name in timed)


def test_what_helps_to_mend_comes_before_what_does_not():
    names = [part.name.partition("-")[0] for part in select([])]
    order = [
        "first",
        "environment",
        "compile",
        "engine",
        "float8",
        "family",
        "tests",
        "kernels",
        "packed",
        "sharing",
        "ranks",
    ]
    assert list(dict.fromkeys(names)) == [*order, "tune", "transformers", "ablations"]


def test_each_part_fits_into_a_command_of_ten_minutes():
    assert max(part.budget_s for part in PARTS) <= LIMIT_S - RESERVE_S - 15


def test_the_digest_of_code_changes_with_it_and_not_with_what_shows_figures(monkeypatch, tmp_path):
    (tmp_path / "tools" / "gpu").mkdir(parents=True)
    shown, run = (tmp_path / "tools" / "gpu" / name for name in ("table.py", "engine_run.py"))
    shown.write_text("1")
    run.write_text("1")
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    monkeypatch.setattr(resume, "BESIDE_THE_FIGURES", {shown})
    digests = []
    for file in (None, shown, run):
        if file is not None:
            file.write_text("2")
        digests.append(resume.digest.__wrapped__(("tools/gpu",)))
    assert digests[0] == digests[1] != digests[2]
