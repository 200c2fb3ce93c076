"""Figures computed from made-up samples, and the screens that show them."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shmllm.ipc import layout
from shmllm.ipc.error_log import LoggedError
from shmllm.ipc.histogram import Durations, bucket_of
from shmllm.ipc.stats import PHASES, Histogram, Stat
from shmllm.monitor.figures import figures
from shmllm.monitor.find import FoundEngine
from shmllm.monitor.keys import Key, parse
from shmllm.monitor.sample import ClientSample, Sample
from shmllm.monitor.screen import engine_screen, list_screen, milliseconds, sparkline

ENGINE = FoundEngine("main", 77, Path("/nowhere"), (0, 0))
MS = 1_000_000


def durations(*values_ns: int) -> Durations:
    counts = [0] * layout.HISTOGRAM_BUCKETS
    for value in values_ns:
        counts[bucket_of(value)] += 1
    return Durations(counts, sum(values_ns))


def sample(time_s: float = 0.0, **stats: int) -> Sample:
    values = {stat.name.lower(): 0 for stat in Stat} | {"kv_blocks_total": 100} | stats
    client = ClientSample(88, "python [bold]train.py[/bold]", 0.25, 0.0, True, "active")
    none = {histogram: durations() for histogram in Histogram}
    return Sample(
        int(time_s * 1e9), "ready", "small", "cpu", "float32", "", 75.0, values, none, (client,), ()
    )


def test_rates_are_computed_over_the_interval() -> None:
    before = sample(1.0, generated_tokens=100, prompt_tokens=7, steps=10, requests_finished=1)
    now = sample(3.0, generated_tokens=300, prompt_tokens=7, steps=50, requests_finished=4)
    found = figures(ENGINE, now, before)
    assert found["interval_s"] == 2.0
    assert found["generated_tokens_per_s"] == 100.0
    assert found["prompt_tokens_per_s"] == 0.0
    assert found["steps_per_s"] == 20.0
    assert found["requests_per_s"] == 1.5


def test_hit_rates_and_latencies_are_given_for_the_interval_and_since_the_start() -> None:
    before = sample(1.0, prefix_query_tokens=100, prefix_hit_tokens=0)
    now = sample(2.0, prefix_query_tokens=300, prefix_hit_tokens=100)
    before = replace(before, durations=before.durations | {Histogram.ITL: durations(90 * MS)})
    later = durations(90 * MS, 2 * MS, 2 * MS)
    now = replace(now, durations=now.durations | {Histogram.ITL: later})
    found = figures(ENGINE, now, before)
    assert found["prefix_hit_rate"] == {"interval": 0.5, "since_start": pytest.approx(1 / 3)}
    recent, since_start = found["itl_ms"]["interval"], found["itl_ms"]["since_start"]
    assert (recent["count"], since_start["count"]) == (2, 3)
    assert recent["mean"] == 2.0
    assert recent["p99"] == pytest.approx(2, rel=0.125)
    assert since_start["p99"] == pytest.approx(90, rel=0.125)
    assert found["ttft_ms"]["interval"] == {
        "count": 0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
    }


def test_acceptance_is_given_for_the_interval_and_since_the_start() -> None:
    before = sample(1.0, drafts=10, draft_tokens=40, accepted_tokens=0)
    now = sample(3.0, drafts=30, draft_tokens=120, accepted_tokens=60)
    found = figures(ENGINE, now, before)
    assert found["draft_tokens_per_s"] == 40.0
    assert found["draft_acceptance_rate"] == {"interval": 0.75, "since_start": 0.5}
    assert found["mean_acceptance_length"] == {"interval": 4.0, "since_start": 3.0}
    none = {"interval": None, "since_start": None}
    idle = figures(ENGINE, sample(2.0), sample(1.0))
    assert idle["draft_acceptance_rate"] == idle["mean_acceptance_length"] == none


def test_drafts_are_shown_once_there_are_some() -> None:
    now = sample(3.0, drafts=30, draft_tokens=120, accepted_tokens=60)
    found = figures(ENGINE, now, sample(1.0))
    text = " ".join("\n".join(shown(engine_screen(found, [], "main"), 120)).split())
    assert "drafted 60 tokens/s" in text
    assert "accepted 50.0 %, 50.0 % in all" in text
    assert "per draft 3 tokens" in text
    assert "drafted" not in "\n".join(shown(engine_screen(BUSY, [], "main"), 120))


def test_phases_are_means_over_the_steps_of_the_interval() -> None:
    before = sample(1.0, steps=10, execute_ns=1000, drain_ns=5000)
    now = sample(2.0, steps=14, execute_ns=9000, drain_ns=5000)
    found = figures(ENGINE, now, before)["phases_us"]
    assert list(found) == list(PHASES)
    assert (found["execute"], found["drain"]) == (2.0, 0.0)
    assert figures(ENGINE, now, now)["phases_us"] is None


def test_without_an_earlier_sample_the_figures_of_the_interval_are_none() -> None:
    found = figures(ENGINE, sample(1.0, steps=3), None)
    assert found["interval_s"] is found["steps_per_s"] is None
    assert found["ttft_ms"]["interval"] is found["prefix_hit_rate"]["interval"] is None
    json.dumps(found)


def shown(renderable: object, width: int) -> list[str]:
    console = Console(width=width, height=50, file=io.StringIO())
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


BUSY = figures(
    ENGINE, sample(2.0, steps=10, execute_ns=9 * MS, sample_ns=MS, running=3), sample(1.0)
)


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("found", [BUSY, figures(ENGINE, sample(), None)], ids=["busy", "new"])
def test_a_screen_fits_any_width(width: int, found: dict[str, object]) -> None:
    for lines in (
        shown(engine_screen(found, [0, 3, 9], "main", "q quit"), width),
        shown(list_screen([("main", found)] * 3, 1, "q quit"), width),
        shown(list_screen([], 0), width),
    ):
        assert max(map(len, lines)) <= width


def test_a_narrow_screen_leaves_out_the_latencies_since_the_start() -> None:
    wide, narrow = ("\n".join(shown(engine_screen(BUSY, [], "main"), w)) for w in (110, 70))
    assert "in all p99" in wide
    assert "in all p99" not in narrow
    assert "TTFT" in narrow
    assert "p99" in narrow
    assert "…" not in narrow.splitlines()[6]


def test_a_screen_shows_the_figures() -> None:
    text = "\n".join(shown(engine_screen(BUSY, [1.0], "main"), 120))
    for words in (
        "main",
        "pid 77",
        "ready",
        "small on cpu",
        "up 1.2 min",
        "running     3",
        "execute 900 us (90 %)",
        "TTFT",
    ):
        assert words in text
    assert "python [bold]train.py[/bold]" in text  # a command is not read as markup
    assert "no engine" in "\n".join(shown(list_screen([], None), 80))


def test_the_latest_error_is_shown_in_one_line_with_its_age() -> None:
    assert (BUSY["errors"], BUSY["last_error"]) == (0, None)
    assert "last error" not in "\n".join(shown(engine_screen(BUSY, [], "main"), 120))
    now_ns = time.time_ns()
    errors = (
        LoggedError("one", 3, now_ns - 900 * 10**9, now_ns - 800 * 10**9),
        LoggedError("two [bold]x[/bold] " + "y" * 200, 4, 0, now_ns - 90 * 10**9),
    )
    found = figures(ENGINE, replace(sample(), errors=errors), None)
    assert found["errors"] == 7
    assert found["last_error"]["count"] == 4
    assert found["last_error"]["age_s"] == pytest.approx(90, abs=60)
    lines = shown(engine_screen(found, [], "main", "q quit"), 80)
    (line,) = (line for line in lines if "last error" in line)
    assert "min ago: two [bold]x[/bold] yyy" in line
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("state", "word"),
    [("active", "sleeps"), ("idle", "idle"), ("hung 7 s", "hung 7 s"), ("stopped", "stopped")],
)
def test_a_screen_shows_the_state_of_each_front_end(state: str, word: str) -> None:
    client = BUSY["clients"][0] | {"state": state}
    lines = shown(engine_screen(BUSY | {"clients": [client]}, [], "main"), 120)
    assert any("88" in line and word in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ready"),
        ({"paused": 1}, "paused"),
        ({"asleep": 3, "paused": 1}, "asleep"),
        ({"asleep": 8}, "weights missing"),
    ],
)
def test_the_state_says_whether_the_engine_is_paused_or_asleep(
    changes: dict[str, int], state: str
) -> None:
    found = figures(ENGINE, sample(**changes), None)
    assert found["state"] == state
    assert found["asleep"] == (state == "asleep")
    assert f", {state}" in shown(engine_screen(found, [], "main"), 100)[0]
    dead = replace(sample(**changes), state="dead")
    assert figures(ENGINE, dead, None)["state"] == "dead"


def test_at_80_columns_a_list_keeps_its_figures_and_shortens_names() -> None:
    long = BUSY | {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "running": 123, "kv_used": 1.0}
    lines = shown(list_screen([("the-engine-of-somebody", long), ("main", BUSY)], None), 80)
    heading, first, second = lines[2:5]
    assert heading.split() == [
        *("engine", "model", "state", "tokens/s", "run", "wait", "KV", "TTFT", "ITL")
    ]
    assert first.startswith("the-engin")
    assert "HuggingFa" in first
    assert "123" in first
    assert "100.0 %" in first
    assert second.split()[:3] == ["main", "small", "ready"]
    assert "…" not in second
    wide = "\n".join(shown(list_screen([("main", BUSY)], None), 130))
    assert "used by" in wide
    assert "train.py" in wide


def test_a_stacked_bar_fills_its_width_in_proportion() -> None:
    bar = next(line for line in shown(engine_screen(BUSY, [], "main"), 100) if "████" in line)
    assert bar.count("█") == 100 - 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0005, "0.5 us"), (0.5, "500 us"), (2.345, "2.35 ms"), (12_345.0, "12.35 s")],
)
def test_a_duration_has_a_suitable_unit(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


def test_a_sparkline_shows_the_latest_values_scaled_to_the_largest() -> None:
    assert sparkline([5, 0, 5, 10], 3) == "▁▅█"
    assert sparkline([], 3) == ""
    assert sparkline([0, 0], 3) == "▁▁"


def test_several_keys_in_one_read_are_parsed() -> None:
    assert parse(b"j\x1b[A\rb+-q") == [
        Key.DOWN,
        Key.UP,
        Key.ENTER,
        Key.BACK,
        Key.FASTER,
        Key.SLOWER,
        Key.QUIT,
    ]
    assert parse(b"\x1b") == [Key.QUIT]
    assert parse(b"xyz\x1b[Z") == []


def test_a_list_has_the_sum_of_a_pool_behind_its_last_engine() -> None:
    def member(pid: int, *bells: str) -> dict[str, Any]:
        clients = [BUSY["clients"][0] | {"bell": bell} for bell in bells]
        return BUSY | {"name": None, "pid": pid, "clients": clients, "running": pid}

    engines = [(str(pid), member(pid, *bells)) for pid, bells in
               ((10, ("a",)), (20, ("a", "b")), (30, ("c",)))]  # fmt: skip
    names = [line.split()[:3] for line in shown(list_screen(engines, None), 130)]
    assert [words[0] for words in names if words][2:6] == ["10", "20", "pool", "30"]
    (total,) = (line for line in shown(list_screen(engines, None), 130) if "pool of 2" in line)
    assert "10+20" in total
    assert total.split()[-2] == "30"


def test_a_shared_cache_is_shown_if_there_is_one() -> None:
    before = sample(1.0, prefix_query_tokens=100)
    now = sample(
        2.0,
        prefix_query_tokens=300,
        prefix_hit_tokens=150,
        shared_hit_tokens=50,
        shared_kv_cache_bytes=2**30,
        shared_blocks_lent=7,
        shared_blocks_saved=1234,
        shared_blocks_reused=56,
    )
    found = figures(ENGINE, now, before)
    assert found["shared_hit_rate"] == {"interval": 0.25, "since_start": pytest.approx(1 / 6)}
    assert found["shared_kv_cache_bytes"] == 2**30
    lines = "\n".join(shown(engine_screen(found, [], "main"), 160))
    assert "25.0 %, 16.7 % in all" in lines
    assert "7 blocks" in lines
    assert "1,234 blocks, 56 reused" in lines
    alone = "\n".join(shown(engine_screen(figures(ENGINE, before, None), [], "main"), 160))
    assert "shared hits" not in alone
