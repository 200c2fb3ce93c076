"""The picture of quantities over time: well-formed, to scale, and without references to files."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shmllm.bench.axes import LinearAxis
from shmllm.bench.chart import WIDTH
from shmllm.bench.timeline import LEFT, RIGHT, Panel, timeline_svg, write_timeline

NAMESPACE = "{http://www.w3.org/2000/svg}"
REWARD = Panel("reward <mean> & co", [(1.0, 0.1), (2.0, 0.5), (4.0, 0.4)])
MEMORY = Panel("memory, MiB", [(0.0, 300.0), (2.5, 340.0), (4.0, 301.0)])


def lines(picture: str) -> list[list[tuple[float, float]]]:
    """The pixels of the line in each panel."""
    found = ElementTree.fromstring(picture).iter(f"{NAMESPACE}polyline")
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in found
    ]


def test_points_are_to_scale_and_panels_do_not_overlap() -> None:
    upper, lower = lines(timeline_svg("t", [REWARD, MEMORY]))
    xs = [x for x, _ in lower]
    assert xs == [LEFT, pytest.approx(LEFT + (xs[-1] - LEFT) * 2.5 / 4, abs=0.1), WIDTH - RIGHT]
    low, high, middle = (y for _, y in upper)
    assert (middle - high) / (low - high) == pytest.approx(0.25, abs=0.01)
    assert max(y for _, y in upper) < min(y for _, y in lower)


def test_spans_are_drawn_at_their_seconds() -> None:
    root = ElementTree.fromstring(timeline_svg("t", [REWARD, MEMORY], [(1.0, 2.0)], "asleep"))
    spans = [r for r in root.iter(f"{NAMESPACE}rect") if "fill-opacity" in r.attrib]
    assert len(spans) == 2
    scale = (WIDTH - RIGHT - LEFT) / 4
    for span in spans:
        assert float(span.attrib["x"]) == pytest.approx(LEFT + scale, abs=0.1)
        assert float(span.attrib["width"]) == pytest.approx(scale, abs=0.1)
    assert "shaded: asleep" in {text.text for text in root.iter(f"{NAMESPACE}text")}


def test_the_page_loads_no_other_file_and_text_is_escaped(tmp_path: Path) -> None:
    page = write_timeline(tmp_path / "t.html", "a < b", [REWARD]).read_text(encoding="utf-8")
    # These are the names of XML namespaces, which no viewer loads.
    assert set(re.findall(r"https?://([^/]*)", page)) == {"www.w3.org"}
    assert not re.search(r"<script|@import|url\(|src=", page)
    assert "reward &lt;mean&gt; &amp; co" in page
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3.0, 7.5], [1e-6, 2e-6], [1e9, 1e9 + 1]])
def test_ticks_are_round_and_enclose_the_values(values: list[float]) -> None:
    axis = LinearAxis.enclosing(values, 100, 0)
    ticks = axis.ticks()
    pixels = [axis.place(tick) for tick in ticks]
    assert 2 <= len(ticks) <= 11
    assert (pixels[0], pixels[-1]) == pytest.approx((100, 0))
    assert pixels == sorted(pixels, reverse=True)
    assert len({axis.label(tick) for tick in ticks}) == len(ticks)
    assert all(0 <= axis.place(value) <= 100 for value in values)


def test_invalid_panels_and_file_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.html, got 't\.png'"):
        write_timeline(tmp_path / "t.png", "t", [REWARD])
    for panels in ([Panel("empty", [])], [], [REWARD] * 5):
        with pytest.raises(ValueError, match="1 to 4 panels with points"):
            write_timeline(tmp_path / "t.svg", "t", panels)
    assert not list(tmp_path.iterdir())
