"""Draws figures as text for a terminal.

This module owns tables, bars and colours. It must not know the source of the figures, nor how the
terminal is controlled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shmllm.ipc.stats import PHASES

Figures = Mapping[str, Any]

PHASE_COLOURS = dict(
    zip(
        PHASES,
        ("magenta", "blue", "cyan", "green", "yellow", "bright_black", "red"),
        strict=True,
    )
)
STATE_COLOURS = {"ready": "green"} | dict.fromkeys(("paused", "starting", "asleep"), "yellow")
LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "step_ms": "step"}
QUANTILES = ("p50", "p90", "p99")
STEPS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 12
WIDE_COLUMNS = 90
WIDE_LIST_COLUMNS = 120


class StackedBar:
    """A bar over the full width, divided in proportion to the sizes of its parts.

    Args:
        parts: (size, colour) of each part.
    """

    def __init__(self, parts: Sequence[tuple[float, str]]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        whole = sum(size for size, _ in self._parts)
        begin = end = 0.0
        for size, colour in self._parts:
            end += size / whole * options.max_width if whole else 0.0
            cells = round(end) - round(begin)
            yield Segment("█" * cells, Style(color=colour))
            begin = end
        yield Segment.line()


class ByWidth:
    """Shows one of two versions, depending on the width.

    Args:
        wide: the version for `columns` columns or more.
        narrow: the version for fewer columns.
        columns: the width from which the wide version fits.
    """

    def __init__(
        self, wide: RenderableType, narrow: RenderableType, columns: int = WIDE_COLUMNS
    ) -> None:
        self._wide = wide
        self._narrow = narrow
        self._columns = columns

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield self._wide if options.max_width >= self._columns else self._narrow


def engine_screen(
    figures: Figures, history: Sequence[float], title: str, footer: str = ""
) -> RenderableType:
    """The screen of one engine.

    Args:
        figures: the figures of its last interval.
        history: the generated tokens/s of the latest intervals, oldest first.
        title: the engine's name or pid.
        footer: the help line for keys.
    """
    parts: list[RenderableType] = [
        _heading(figures, title),
        _overview(figures, history),
        _latencies(figures),
        _anatomy(figures),
        _clients(figures["clients"]),
    ]
    if figures["last_error"]:
        parts.append(_last_error(figures["last_error"]))
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


def list_screen(
    engines: Iterable[tuple[str, Figures]], selected: int | None, footer: str = ""
) -> RenderableType:
    """The screen with one line for each engine.

    Args:
        engines: (title, figures) of each engine.
        selected: the index of the highlighted line; None for no highlight.
        footer: the help line for keys.
    """
    listed = list(engines)
    wide, narrow = (_list_table(listed, selected, is_wide) for is_wide in (True, False))
    body: RenderableType = Text("no engine of this user runs")
    if listed:
        body = ByWidth(wide, narrow, WIDE_LIST_COLUMNS)
    return Group(Text("shmllm top", style="bold"), Text(), body, Text(), Text(footer, style="dim"))


def _list_table(
    engines: Sequence[tuple[str, Figures]], selected: int | None, is_wide: bool
) -> Table:
    """The lines of `list_screen`. Only names lose their ends where columns are missing."""
    table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
    for name in ("engine", "model"):
        table.add_column(name, ratio=None if is_wide else 1)
    table.add_column("state")
    for name in ("tokens/s", "run", "wait", "KV", "TTFT p50", "ITL p50"):
        table.add_column(
            name if is_wide else name.removesuffix(" p50"), justify="right", no_wrap=True
        )
    if is_wide:
        table.add_column("clients", justify="right", no_wrap=True)
        table.add_column("used by", no_wrap=True, overflow="ellipsis", ratio=1)
    pools = _pools(engines)
    for index, (title, figures) in enumerate(engines):
        cells: list[str | Text] = [
            _name(title if figures["name"] else f"{title} (private)"),
            _name(figures["model"] or "-"),
            _name(_state(figures)),
            number(figures["generated_tokens_per_s"]),
            number(figures["running"]),
            number(figures["waiting"]),
            percent(figures["kv_used"]),
            milliseconds(_recent(figures["ttft_ms"])["p50"]),
            milliseconds(_recent(figures["itl_ms"])["p50"]),
        ]
        if is_wide:
            clients = figures["clients"]
            cells += [str(len(clients)), Text(clients[0]["command"] if clients else "")]
        table.add_row(*cells, style="reverse" if index == selected else "")
        for members in pools.get(index, []):
            table.add_row(*_sum_of_pool(members), style="dim")
    return table


def _pools(engines: Sequence[tuple[str, Figures]]) -> dict[int, list[list[Figures]]]:
    """The figures of the engines of each pool, by the index of its last engine: engines that share
    a front end."""
    members: dict[str, list[int]] = {}
    for index, (_, figures) in enumerate(engines):
        for bell in {client["bell"] for client in figures["clients"]}:
            members.setdefault(bell, []).append(index)
    found: dict[int, list[list[Figures]]] = {}
    for indexes in members.values():
        if len(indexes) > 1:
            found.setdefault(indexes[-1], []).append([engines[index][1] for index in indexes])
    return found


def _sum_of_pool(members: Sequence[Figures]) -> list[str | Text]:
    """The cells of a pool's engines together."""
    rates = [each["generated_tokens_per_s"] for each in members]
    pids = "+".join(str(each["name"] or each["pid"]) for each in members)
    return [
        _name(f"pool of {len(members)}"),
        _name(pids),
        "",
        number(None if None in rates else sum(rates)),
        number(sum(each["running"] for each in members)),
        number(sum(each["waiting"] for each in members)),
    ]


def _name(name: str | Text) -> Text:
    """A cell of one line, whose end an ellipsis replaces where the column is too narrow."""
    text = Text(name) if isinstance(name, str) else name
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def number(value: float | None) -> str:
    """A number with about three digits; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def milliseconds(value: float | None) -> str:
    """A duration with a suitable unit (us, ms or s); "-" for None."""
    if value is None:
        return "-"
    for limit, scale, unit in ((1.0, 1e-3, "us"), (1e3, 1.0, "ms")):
        if value < limit:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e3:,.2f} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values as columns, scaled to the largest of them."""
    latest = list(values)[-width:]
    most = max(latest, default=0.0) or 1.0
    return "".join(STEPS[round(value / most * (len(STEPS) - 1))] for value in latest)


def _state(figures: Figures) -> Text:
    state = figures["state"]
    return Text(state, style=STATE_COLOURS.get(state, "bold red"))


def _heading(figures: Figures, title: str) -> Text:
    kind = "" if figures["name"] else "private, "
    over = figures["interval_s"]
    return Text.assemble(
        ("shmllm top ", "bold"),
        (title, "bold cyan"),
        f"  {kind}pid {figures['pid'] or 'not seen from here'}, ",
        _state(figures),
        f", {figures['model']}" if figures["model"] else "",
        f" on {figures['device']}" if figures["device"] else "",
        f", up {_age(figures['uptime_s'])}" if figures["uptime_s"] else "",
        f"   over the last {over:.2g} s" if over else "",
        no_wrap=True,
        overflow="ellipsis",
    )


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _last_error(error: Mapping[str, Any]) -> Text:
    return Text.assemble(
        ("last error ", "dim"),
        f"{_age(error['age_s'])} ago: ",
        (error["text"], "red"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _overview(figures: Figures, history: Sequence[float]) -> RenderableType:
    hits = figures["prefix_hit_rate"]
    used = figures["kv_used"] or 0.0
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in range(3):
        grid.add_column(ratio=1, no_wrap=True)
    cells = [
        ("generated", f"{number(figures['generated_tokens_per_s'])} tokens/s"),
        ("prompt", f"{number(figures['prompt_tokens_per_s'])} tokens/s"),
        ("requests", f"{number(figures['requests_per_s'])}/s"),
        ("running", number(figures["running"])),
        ("waiting", number(figures["waiting"])),
        ("preempted", number(figures["preemptions"])),
        ("KV cache", f"{_gauge(used)} {percent(figures['kv_used'])}"),
        ("prefix hits", f"{percent(hits['interval'])}, {percent(hits['since_start'])} in all"),
        ("steps", f"{number(figures['steps_per_s'])}/s"),
    ]
    if figures["shared_kv_cache_bytes"]:
        cells += _shared_cells(figures)
    if figures["draft_tokens"]:
        cells += _draft_cells(figures)
    texts = [Text.assemble((f"{name:<11} ", "dim"), value) for name, value in cells]
    for begin in range(0, len(texts), 3):
        grid.add_row(*texts[begin : begin + 3])
    line = Text.assemble(("tokens/s    ", "dim"), (sparkline(history, 60), "green"))
    return Panel(Group(grid, line), border_style="dim")


def _shared_cells(figures: Figures) -> list[tuple[str, str]]:
    """What the shared cache is used for."""
    hits = figures["shared_hit_rate"]
    saved, reused = figures["shared_blocks_saved"], figures["shared_blocks_reused"]
    return [
        ("shared hits", f"{percent(hits['interval'])}, {percent(hits['since_start'])} in all"),
        ("lent", f"{number(figures['shared_blocks_lent'])} blocks"),
        ("saved", f"{number(saved)} blocks, {number(reused)} reused"),
    ]


def _draft_cells(figures: Figures) -> list[tuple[str, str]]:
    """What becomes of drafted tokens."""
    rates, lengths = figures["draft_acceptance_rate"], figures["mean_acceptance_length"]
    even = figures["draft_break_even"]
    return [
        ("drafted", f"{number(figures['draft_tokens_per_s'])} tokens/s"),
        ("accepted", f"{percent(rates['interval'])}, {percent(rates['since_start'])} in all"),
        ("per draft", f"{number(lengths['interval'] or lengths['since_start'])} tokens"),
        *([("pays above", f"{percent(even)} accepted")] if even else []),
    ]


def _gauge(share: float) -> str:
    full = round(share * BAR_WIDTH)
    return "█" * full + "░" * (BAR_WIDTH - full)


def _recent(latencies: Mapping[str, Any]) -> Mapping[str, Any]:
    """The latencies of the interval, or since the start if the interval has none."""
    recent: Mapping[str, Any] = latencies["interval"] or {}
    return recent if recent.get("count") else latencies["since_start"]


def _latencies(figures: Figures) -> RenderableType:
    wide = _latency_table(figures, {"interval": "", "since_start": "in all "})
    narrow = _latency_table(figures, {"interval": ""})
    return Panel(ByWidth(wide, narrow), border_style="dim")


def _latency_table(figures: Figures, spans: Mapping[str, str]) -> Table:
    table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
    table.add_column("latency", style="dim", no_wrap=True)
    for prefix in spans.values():
        table.add_column(f"{prefix}count", justify="right", no_wrap=True)
        for quantile in QUANTILES:
            table.add_column(f"{prefix}{quantile}", justify="right", no_wrap=True)
    for key, name in LATENCIES.items():
        cells = []
        for span in spans:
            found = figures[key][span] or {}
            cells.append(number(found.get("count")))
            cells += [milliseconds(found.get(quantile)) for quantile in QUANTILES]
        table.add_row(name, *cells)
    return table


def _anatomy(figures: Figures) -> RenderableType:
    phases = figures["phases_us"]
    if phases is None:
        return Panel(Text("no step in this interval", style="dim"), border_style="dim")
    whole = sum(phases.values()) or 1.0
    legend = [Text.assemble(("a step ", "dim"), milliseconds(whole / 1e3))]
    for phase, value in phases.items():
        told = f"{phase} {milliseconds(value / 1e3)} ({100 * value / whole:.0f} %)"
        legend.append(Text.assemble(("■ ", PHASE_COLOURS[phase]), told))
    bar = StackedBar([(value, PHASE_COLOURS[phase]) for phase, value in phases.items()])
    return Panel(Group(bar, Columns(legend, padding=(0, 2))), border_style="dim")


def _client_state(client: Mapping[str, Any]) -> Text:
    state = client["state"]
    if state == "active" and client["is_parked"] is not None:
        return Text("sleeps" if client["is_parked"] else "awake")
    return Text(state, style="dim" if state == "idle" else "bold red")


def _clients(clients: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
    table.add_column("client", justify="right", no_wrap=True)
    table.add_column("requests ring", no_wrap=True)
    table.add_column("outputs ring", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
    for client in clients:
        table.add_row(
            str(client["pid"]),
            f"{_gauge(client['requests_used'])} {percent(client['requests_used'])}",
            f"{_gauge(client['outputs_used'])} {percent(client['outputs_used'])}",
            _client_state(client),
            Text(client["command"]),
        )
    body: RenderableType = table if clients else Text("no client", style="dim")
    return Panel(body, border_style="dim")
