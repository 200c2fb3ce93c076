"""Formats the record as a short Markdown text with tables of targets and figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu.derived import figure
from gpu.families import FAMILIES
from gpu.shapes import NAMES
from gpu.tests_part import SHARDS

REHEARSAL = "**A rehearsal without a GPU: these are no GPU figures and say nothing about speed.**"
KERNEL_ROWS = 6


def markdown(record: dict[str, Any]) -> str:
    """Returns the text of a record."""
    sections = [
        _head(record),
        _targets(record),
        _first(record),
        _decode(record),
        _sampled(record),
        _prefill(record),
        _memory(record),
        _transformers(record),
        _ablations(record),
        _kernels(record),
        _packed(record),
        _ranks(record),
        _profiles(record),
        _proposed(record),
        _failures(record),
        _parts(record),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _head(record: dict[str, Any]) -> str:
    parts = record["parts"]
    card = figure(parts, "environment", "card") or {}
    versions = figure(parts, "environment", "versions") or {}
    bandwidth = figure(parts, "environment", "bandwidth") or {}
    packages = [f"{name} {version}" for name, version in versions.items() if version]
    copy, read = (_scaled(bandwidth.get(kind), 1e-12) for kind in ("copy", "read"))
    rate = _scaled(figure(parts, "environment", "gemm", "flops_per_s"), 1e-12)
    launch = figure(parts, "environment", "launch") or {}
    lines = [REHEARSAL] if record["rehearsal"] else []
    if stopped := record["stopped"]:
        lines.append(f"**Stopped at {stopped['part']}: {stopped['status']}: {stopped['error']}**")
    elif record["next"]:
        lines.append(f"**Not complete: the same command goes on with {record['next']}.**")
    made = f"{record['date']}, commit {record['commit']}, {record['seconds']:.0f} s"
    if not card:
        return "\n\n".join([*lines, f"{made}. The part environment was not measured."])
    lines += [
        f"{made}; {card.get('name')}, driver {card.get('driver')}, {', '.join(packages)}.",
        f"Copy {_cell(copy)} TB/s (read and written), read {_cell(read)} TB/s, GEMM "
        f"{_cell(rate)} TFLOP/s, a launch {_cell(launch.get('host_us'))} us of the host's time.",
    ]
    return "\n\n".join(lines)


def _targets(record: dict[str, Any]) -> str:
    unknown = "a rehearsal" if record["rehearsal"] else "not measured"
    words = {True: "yes", False: "**no**", None: unknown}
    rows = (
        (t["name"], t["measured"], f"{t['sense']} {t['asked']:g}", words[t["ok"]])
        for t in record["targets"]
    )
    return "## Targets\n\n" + _table(("target", "measured", "asked", "ok"), rows)


def _decode(record: dict[str, Any]) -> str:
    rows = list(_decode_rows(record))
    if not rows:
        return ""
    head = ("model", "batch", "tokens/s", "step us", "of copy", "of read", "host us", "waited us")
    return "## Decode\n\n" + _table(head, rows)


def _decode_rows(record: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    derived = record["derived"]
    measured = [
        *((f"engine-{size}", NAMES[size], shares) for size, shares in derived["decode"].items()),
        ("float8", f"{NAMES['8b']}, FP8 keys", derived["float8"]),
        *(
            (f"family-{name}", FAMILIES[name].name, shares)
            for name, shares in derived["families"].items()
        ),
    ]
    for part, name, batches in measured:
        for batch, shares in batches.items():
            found = figure(record["parts"], part, "decode", batch)
            figures = (found.get(name) for name in ("host_us", "waited_us"))
            yield (
                name,
                batch,
                found.get("tokens_per_s"),
                found.get("step_us"),
                shares["of_copy"],
                shares["of_read"],
                *figures,
            )


def _first(record: dict[str, Any]) -> str:
    """Returns the figures of the part `first` that help to choose a config."""
    times = figure(record["parts"], "first", "stages", "us") or {}
    rows = [(f"{name}, {n} stages", us) for name, each in times.items() for n, us in each.items()]
    return "## Stages of attention\n\n" + _table(("step", "us"), rows) if rows else ""


def _sampled(record: dict[str, Any]) -> str:
    rows = [
        (NAMES[size], load, batch, times)
        for size, loads in record["derived"]["sampled"].items()
        for load, batches in loads.items()
        for batch, times in batches.items()
    ]
    head = ("model", "load", "batch", "times a greedy step")
    return "## Sampled loads\n\n" + _table(head, rows) if rows else ""


def _memory(record: dict[str, Any]) -> str:
    rows = []
    for size, name in NAMES.items():
        sleep, update = (
            figure(record["parts"], f"engine-{size}", each) or {} for each in ("sleep", "update")
        )
        if sleep or update:
            gigabytes = _scaled(sleep.get("bytes"), 1e-9)
            times = (sleep.get("sleep_s"), sleep.get("wake_s"), update.get("update_s"))
            rows.append((name, gigabytes, *times))
    head = ("model", "GB", "sleep s", "wake s", "update s")
    return "## Sleep and weight updates\n\n" + _table(head, rows) if rows else ""


def _prefill(record: dict[str, Any]) -> str:
    rows = [
        (
            NAMES[size],
            _scaled(figure(record["parts"], f"engine-{size}", "prefill", "s"), 1e3),
            _scaled(shares["flops_per_s"], 1e-12),
            shares["of_gemm"],
            figure(record["parts"], f"engine-{size}", "start", "ready_s"),
            figure(record["parts"], f"engine-{size}", "start", "graphs"),
            figure(record["parts"], f"engine-{size}", "start", "num_blocks"),
        )
        for size, shares in record["derived"]["prefill"].items()
    ]
    head = ("model", "prefill ms", "TFLOP/s", "of GEMM", "ready s", "graphs", "KV blocks")
    return "## Prefill and start\n\n" + _table(head, rows) if rows else ""


def _transformers(record: dict[str, Any]) -> str:
    rows = [
        (NAMES[size], mode, batch, ratios["whole"], ratios["decode"], ratios["agreed"])
        for size, modes in record["derived"]["transformers"].items()
        for mode, batches in modes.items()
        for batch, ratios in batches.items()
    ]
    head = ("model", "transformers", "batch", "times, whole run", "times, decode", "equal tokens")
    return "## Compared with transformers\n\n" + _table(head, rows) if rows else ""


def _ablations(record: dict[str, Any]) -> str:
    variants = figure(record["parts"], "ablations", "arms") or {}
    rows = [
        (
            variant,
            batch,
            *(found[batch].get(name) for name in ("tokens_per_s", "step_us", "host_us")),
        )
        for variant, found in variants.items()
        for batch in found
        if batch != "start"
    ]
    head = ("variant", "batch", "tokens/s", "step us", "host us")
    return "## Graph modes and overlapped steps\n\n" + _table(head, rows) if rows else ""


def _orders(measured: list[tuple[str, str, dict[str, Any]]]) -> str:
    """Returns the microseconds of attention by the order within a block of the cache and the number
    of splits, of models, batches and their figures."""
    rows = [
        (name, batch, order, *by_splits.values())
        for name, batch, found in measured
        for order, by_splits in found.get("others", {}).items()
    ]
    if not rows:
        return ""
    splits = next(each for *_, found in measured for each in found["others"].values())
    return _table(("model", "batch", "order", *(f"us, splits {n}" for n in splits)), rows)


def _kernels(record: dict[str, Any]) -> str:
    """Returns the bytes per second of each matrix product by rows, and of attention by batch."""
    rows: list[tuple[Any, ...]] = []
    numbers: list[str] = []
    for size, matrices in (figure(record["parts"], "kernels", "products") or {}).items():
        for matrix, by_rows in matrices.items():
            numbers = list(by_rows)
            rates = (max(each["bytes_per_s"] for each in by_rows[n].values()) for n in numbers)
            rows.append((NAMES[size], matrix, *(rate * 1e-12 for rate in rates)))
    products = _table(("model", "matrix", *(f"{n} rows" for n in numbers)), rows) if rows else ""
    of_models = figure(record["parts"], "kernels", "attention") or {}
    measured = [
        (NAMES[size], batch, found)
        for size, batches in of_models.items()
        for batch, found in batches.items()
    ]
    decodes = [
        (name, batch, found["us"], found["bytes_per_s"] * 1e-12, found["splits"])
        for name, batch, found in measured
    ]
    head = ("model", "batch", "attention us", "TB/s", "splits")
    attention = _table(head, decodes) if decodes else ""
    found = [table for table in (products, attention, _orders(measured)) if table]
    return "\n\n".join(["## Products (TB/s of the matrix) and attention", *found]) if found else ""


def _packed(record: dict[str, Any]) -> str:
    """Returns the speed of products with packed weights, by kind and number of rows."""
    rows: list[tuple[Any, ...]] = []
    numbers: list[str] = []
    for shape, kinds in (figure(record["parts"], "packed", "linear") or {}).items():
        for kind, by_rows in kinds.items():
            numbers = list(by_rows)
            cells = [
                (each["bytes_per_s"] * 1e-9, each.get("times", 1.0)) for each in by_rows.values()
            ]
            rows.append((shape, kind, *(cell for pair in cells for cell in pair)))
    named = [name for n in numbers for name in (f"{n} rows GB/s", f"{n} rows, times torch")]
    title = "## Products with packed weights (GB/s of the packed matrix)\n\n"
    return title + _table(("matrix", "weights", *named), rows) if rows else ""


def _ranks(record: dict[str, Any]) -> str:
    """Returns the time of sums of two ranks, by number of rows."""
    sums = figure(record["parts"], "ranks", "sums") or {}
    rows = [(count, each["us"], each["nccl_us"]) for count, each in sums.items()]
    title = "## Sums of the parts of two GPUs\n\n"
    return title + _table(("rows", "us", "NCCL us"), rows) if rows else ""


def _proposed(record: dict[str, Any]) -> str:
    """Returns the present and the best tile sizes; `--write-tiles` takes those that are better."""
    rows = []
    for part in record["parts"]:
        found = figure(record["parts"], part, "tiles") if part.startswith("tune") else None
        for row in found["rows"] if found else ():
            sizes = (" ".join(map(str, row[when].values())) for when in ("before", "after"))
            times = row["us_before"], row["us_after"]
            rows.append((row["kernel"], row["device"], row["size"], *sizes, *times))
    head = ("kernel", "device", "size", "present", "best", "us before", "us after")
    return f"## Tile sizes\n\n{_table(head, rows)}" if rows else ""


def _profiles(record: dict[str, Any]) -> str:
    lines = []
    for size, name in NAMES.items():
        for batch, found in (figure(record["parts"], f"engine-{size}", "profile") or {}).items():
            rows = [
                (row["name"][:60], row["us_per_step"], row["share"], row["calls_per_step"])
                for row in found["kernels"][:KERNEL_ROWS]
            ]
            title = f"{name}, batch {batch}: {_cell(found['us_per_step'])} us a step, "
            title += f"busy {_cell(found['busy_share'])} of the time, "
            title += f"the longest gap {_cell(found['largest_gap_us'])} us"
            lines.append(title + "\n\n" + _table(("kernel", "us", "share", "calls"), rows))
    return "\n\n".join(["## Kernels of a decode step", *lines]) if lines else ""


def _failures(record: dict[str, Any]) -> str:
    shards = (figure(record["parts"], f"tests-{name}", "tests") for name in SHARDS)
    failures = [failure for shard in shards if shard for failure in shard["failures"]]
    lines = [f"- `{each['test']}`: {each['message']}" for each in failures]
    return "\n".join(["## Tests that fail\n", *lines]) if lines else ""


def _parts(record: dict[str, Any]) -> str:
    rows = (
        (name, part["status"], part["seconds"], part["error"] or "")
        for name, part in record["parts"].items()
    )
    return "## Parts\n\n" + _table(("part", "status", "s", "error"), rows)
