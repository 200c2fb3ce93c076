"""Pictures: positions and sizes match the numbers, and a picture refers to no other file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from shmllm.bench import chart
from shmllm.bench.axes import LinearAxis, LogAxis
from shmllm.bench.chart import Frame
from shmllm.bench.engine_plot import PHASE_COLOURS, batches_svg, phases_by_kind, startup_svg
from shmllm.bench.generation import Measured
from shmllm.ipc.stats import PHASES, StepField

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {"left": ("#000000", "#ffffff"), "right & <up>": ("#111111", "#eeeeee")}


def rectangles(parts: list[str]) -> list[dict[str, float]]:
    root = ElementTree.fromstring(f"<g>{''.join(parts)}</g>")
    found = root.iter("rect")
    return [{k: float(r.attrib[k]) for k in ("x", "y", "width", "height")} for r in found]


@pytest.mark.parametrize("lowest", [0.3, 1.0, 1.9, 47.0, 8_000.0])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 4.0, 90.0, 1e5])
def test_a_logarithmic_axis_encloses_all_values_and_has_labels(lowest: float, ratio: float) -> None:
    axis = LogAxis(lowest, lowest * ratio, 100, 500)
    places = [axis.place(lowest), axis.place(lowest * ratio)]
    assert 100 - 1e-6 <= places[0] <= places[1] <= 500 + 1e-6
    ticks = list(axis.ticks())
    assert any(is_labelled for _, is_labelled in ticks)
    assert all(100 - 1 <= axis.place(value) <= 501 for value, _ in ticks)


@pytest.mark.parametrize("highest", [0.004, 1, 3, 7, 99, 12_345])
def test_a_linear_axis_has_a_few_round_ticks(highest: float) -> None:
    axis = LinearAxis(0, highest, 10, 110)
    assert (axis.place(0), axis.place(highest)) == (10, pytest.approx(110))
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert float(f"{ticks[1]:e}"[:4]) in (1.0, 2.0, 5.0)
    assert ticks == pytest.approx([index * ticks[1] for index in range(len(ticks))])


def test_a_histogram_counts_every_value() -> None:
    values = np.random.default_rng(3).lognormal(8, 1, 500).tolist()
    frame = Frame(0, 300, 0, 200)
    parts = list(chart.histogram(values, frame, 1, "ITL", "tokens"))
    bars = rectangles(parts)
    assert all(b["x"] >= 0 and b["x"] + b["width"] <= 300 for b in bars)
    heights = np.array([b["height"] for b in bars])
    # The heights are proportional to whole numbers whose sum is the number of values.
    scale = 500 / heights.sum()
    assert np.allclose(heights * scale, np.round(heights * scale), atol=0.2)
    texts = "".join(ElementTree.fromstring(f"<g>{''.join(parts)}</g>").itertext())
    exact = sorted(values)
    assert f"p50 {chart.duration(exact[249])}, p99 {chart.duration(exact[494])}" in texts
    assert f"max {chart.duration(exact[-1])}" in texts


@pytest.mark.parametrize("value", [0.0, 0.5, 3e7])
def test_a_histogram_of_one_value(value: float) -> None:
    assert len(rectangles(list(chart.histogram([value], Frame(0, 300, 0, 200), 0, "", "")))) == 1


def test_stacked_bars_are_proportional_and_have_no_gaps() -> None:
    rows = [("a", {"left": 30.0, "right & <up>": 10.0}), ("b", {"left": 0.0, "right & <up>": 20.0})]
    bars = rectangles(list(chart.stacked_bars(rows, 5, COLOURS, "time")))
    assert bars[0]["width"] == pytest.approx(3 * bars[1]["width"], abs=0.05)
    assert bars[1]["x"] == pytest.approx(bars[0]["x"] + bars[0]["width"], abs=0.02)
    assert bars[3]["width"] == pytest.approx(2 * bars[1]["width"], abs=0.05)
    shares = rectangles(list(chart.stacked_bars(rows, 5, COLOURS, "share", as_shares=True)))
    assert shares[0]["width"] + shares[1]["width"] == pytest.approx(shares[3]["width"], abs=0.05)


def step(execute_us: int, tokens: int, requests: int, first: int = 0) -> list[int]:
    values = [0] * len(StepField)
    values[StepField.EXECUTE_NS] = 1000 * execute_us
    values[StepField.NUM_TOKENS] = tokens
    values[StepField.NUM_REQUESTS] = values[StepField.NUM_SAMPLED] = requests
    values[StepField.NUM_FIRST] = first
    return values


def measured() -> Measured:
    steps = [step(5000, 64, 2, 2), *[step(1000 + i, 2, 2) for i in range(98)], step(9000, 2, 2)]
    found = Measured([1.0], [64], [200], [0.005] * 2, [0.001] * 198, [0.001] * 2, [0.1] * 2)
    found.steps.append(np.array(steps))
    return found


def test_phases_are_averaged_for_each_kind_of_step() -> None:
    rows = dict(phases_by_kind(measured().all_steps()))
    assert list(rows) == [
        "all steps, mean",
        "decode, median",
        "decode, p90",
        "decode, p99",
        "decode, slowest",
        "with prompts, mean",
    ]
    assert rows["with prompts, mean"]["execute"] == 5000
    assert rows["decode, slowest"]["execute"] == 9000
    assert rows["decode, median"]["execute"] == pytest.approx(1049, abs=2)
    assert all(list(phases) == list(PHASES) for phases in rows.values())


def check_picture(picture: str, *words: str) -> None:
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    texts = "".join(root.itertext())
    assert all(word in texts for word in words)
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    for rectangle in root.iter(f"{SVG}rect"):
        assert float(rectangle.attrib.get("x", 0)) + float(rectangle.attrib["width"]) <= width
        assert float(rectangle.attrib.get("y", 0)) + float(rectangle.attrib["height"]) <= height
    assert "prefers-color-scheme:dark" in texts
    assert not re.search(r"href|url\(|<script|@import", picture)


def test_a_picture_of_batches() -> None:
    batches = {"2 requests": measured(), "<odd>": measured()}
    picture = batches_svg(batches, "bench & co", "a machine")
    check_picture(picture, "bench & co", "<odd>", "TTFT", "ITL", "Step time", "ms", *PHASES)


def test_a_picture_of_starts() -> None:
    rows = [("cold, 1", {"import torch": 2e6, "load": 5e5}), ("attach, 1", {"attach": 2e5})]
    picture = startup_svg(rows, ["import torch", "load", "attach"], "startup", "a machine")
    check_picture(picture, "cold, 1", "import torch", "2.5 s")


def test_a_page_is_valid_html_and_xml() -> None:
    page = chart.page(startup_svg([("a", {"x": 1.0})], ["x"], "t", "s"), "a <title>")
    ElementTree.fromstring(page)
    seen: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.append(tag)

    Tags().feed(page)
    assert seen[:4] == ["html", "head", "meta", "meta"]
    assert "svg" in seen


def luminance(colour: str) -> float:
    """The relative luminance of #rrggbb as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("phase", PHASES)
def test_colours_contrast_with_both_backgrounds(phase: str) -> None:
    """WCAG 2 asks for a contrast of at least 3 to 1 in graphics."""
    for colour, paper in zip(PHASE_COLOURS[phase], ("#ffffff", "#16181c"), strict=True):
        light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour
