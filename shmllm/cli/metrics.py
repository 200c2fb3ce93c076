"""`--metrics-port`: serves an engine's statistics as Prometheus text on the loopback interface.

    python -m shmllm.cli.metrics NAME PID PORT

This module owns the names of the metrics, and the helper process that serves the metrics of a named
engine. The helper reads shared memory and ends with the engine. The engine itself therefore has no
socket, and a scraper cannot delay it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.named import attach_control
from shmllm.extras import install_command
from shmllm.ipc.stats import PHASES, Histogram

if TYPE_CHECKING:
    from shmllm.ipc.histogram import Durations

ADDRESS = "127.0.0.1"
POLL_S = 0.2

Statistics = Mapping[str, int]
Read = Callable[[], tuple[Statistics, Mapping[Histogram, "Durations"]]]

GAUGES = {
    "running": ("requests_running", "Running requests."),
    "waiting": ("requests_waiting", "Waiting requests."),
    "paused": ("paused", "1 while the engine is paused or sleeps, else 0."),
    "asleep": ("asleep", "Sum of sleeping parts: scheduling 1, kv_cache 2, weights 4, missing 8."),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks in use."),
    "kv_blocks_total": ("kv_blocks", "KV blocks in total."),
    "shared_kv_cache_bytes": (
        "shared_kv_cache_bytes",
        "Shared memory for KV blocks that other engines read; 0: the engine shares none.",
    ),
}
COUNTERS = {
    "requests_finished": ("requests_finished", "Finished requests."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were scheduled."),
    "generated_tokens": ("generated_tokens", "Sampled tokens."),
    "prefix_query_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache when a request was first scheduled, those in "
        "blocks of other engines included.",
    ),
    "shared_query_tokens": (
        "external_prefix_cache_queries",
        "Prompt tokens looked up in the shared cache: those that the engine's own cache lacked.",
    ),
    "shared_hit_tokens": (
        "external_prefix_cache_hits",
        "Prompt tokens found in the shared cache when a request was first scheduled.",
    ),
    "shared_blocks_lent": (
        "shared_kv_blocks_lent",
        "Times that requests began to use a block of the shared cache.",
    ),
    "shared_blocks_saved": ("shared_kv_blocks_saved", "Blocks copied into the shared cache."),
    "shared_blocks_reused": (
        "shared_kv_blocks_reused",
        "Blocks of the engine's part of the shared cache that gave way to others.",
    ),
    "item_queries": ("mm_cache_queries", "Images that chunks of prompts needed embeddings of."),
    "item_hits": ("mm_cache_hits", "Those whose embeddings were there."),
    "preemptions": ("preemptions", "Preemptions of requests."),
    "steps": ("steps", "Steps of the engine."),
    "drafts": ("spec_decode_num_drafts", "Drafts of tokens for a request."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Drafted tokens that a step computed."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafted tokens that were right."),
    "times_parked": ("parks", "Times that the engine slept on its doorbell."),
}


HISTOGRAMS = {
    Histogram.TTFT: ("time_to_first_token_seconds", "Time from arrival to the first token."),
    Histogram.ITL: ("inter_token_latency_seconds", "Time between two tokens of a request."),
    Histogram.STEP: ("step_seconds", "Time from a step's schedule phase to its published outputs."),
}
# The bounds of the buckets are powers of two in nanoseconds: 0.26 ms to 69 s.
FIRST_BOUND_BITS, LAST_BOUND_BITS = 18, 36


class EngineCollector:
    """Makes the metrics of a scrape, as a collector of prometheus_client.

    Args:
        read: returns the current statistics and histograms.
        labels: the labels of every sample.
        errors: exceptions of `read` that mean that the engine has ended; the scrape is then empty.
    """

    def __init__(
        self,
        read: Read,
        labels: Mapping[str, str],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._read = read
        self._labels = labels
        self._errors = errors

    def collect(self) -> Iterator[Any]:
        """Yields the metric families."""
        core = import_module("prometheus_client.core")
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        try:
            found, durations = self._read()
        except self._errors:
            return
        names, values = list(self._labels), list(self._labels.values())
        for make, table in ((gauge, GAUGES), (counter, COUNTERS)):
            for key, (name, text) in table.items():
                if key in found:
                    family = make(f"shmllm_{name}", text, labels=names)
                    family.add_metric(values, found[key])
                    yield family
        usage = gauge("shmllm_kv_cache_usage_ratio", "Share of KV blocks in use.", labels=names)
        usage.add_metric(values, found["kv_blocks_used"] / max(found["kv_blocks_total"], 1))
        yield usage
        if num_places := found.get("num_speculative_tokens"):
            yield self._accepted(counter, [found[f"accepted_at_{n}"] for n in range(num_places)])
        phases = counter(
            "shmllm_phase_seconds", "Time in each phase of the steps.", labels=[*names, "phase"]
        )
        for phase in PHASES:
            if (spent_ns := found.get(f"{phase}_ns")) is not None:
                phases.add_metric([*values, phase], spent_ns / 1e9)
        yield phases
        for histogram, counted in durations.items():
            yield self._histogram(core.HistogramMetricFamily, histogram, counted)

    def _accepted(self, make: Any, counts: Sequence[int]) -> Any:
        family = make(
            "shmllm_spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were right, by their place in the draft.",
            labels=[*self._labels, "position"],
        )
        for place, count in enumerate(counts):
            family.add_metric([*self._labels.values(), str(place)], count)
        return family

    def _histogram(self, make: Any, histogram: Histogram, durations: Durations) -> Any:
        from shmllm.ipc.histogram import by_octave

        name, text = HISTOGRAMS[histogram]
        family = make(f"shmllm_{name}", text, labels=list(self._labels))
        bounds = by_octave(durations, FIRST_BOUND_BITS, LAST_BOUND_BITS)
        buckets = [(str(bound_ns / 1e9), count) for bound_ns, count in bounds]
        buckets.append(("+Inf", durations.count))
        family.add_metric(list(self._labels.values()), buckets, durations.total_ns / 1e9)
        return family


def check_metrics_port(port: int | None) -> None:
    """Checks that metrics can be served on `port`; None needs no check.

    Raises:
        click.UsageError: prometheus_client is missing, or the port cannot be bound.
    """
    if port is None:
        return
    try:
        import_module("prometheus_client")
    except ImportError:
        raise click.UsageError(
            f"--metrics-port needs prometheus_client: {install_command('metrics')}"
        ) from None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise click.UsageError(f"--metrics-port: {ADDRESS}:{port} {reason}") from None


def start_metrics_server(
    port: int,
    read: Read,
    labels: Mapping[str, str],
    errors: tuple[type[Exception], ...],
) -> Callable[[], None]:
    """Serves metrics on `port` in a thread; see `EngineCollector` for the other arguments.

    Returns:
        A function that stops the server.
    """
    prometheus = import_module("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(EngineCollector(read, labels, errors))
    server, thread = prometheus.start_http_server(port, addr=ADDRESS, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def metrics_command(name: str, pid: int, port: int) -> list[str]:
    """The command line of the helper process that serves the metrics of a named engine."""
    return [sys.executable, "-m", "shmllm.cli.metrics", name, str(pid), str(port)]


def serve_named(name: str, pid: int, port: int) -> int:
    """Serves the metrics of the engine `name` until it ends.

    Args:
        name: the engine's name.
        pid: the engine's process, which may still be starting.
        port: the port to serve on.
    """
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.liveness import wait_for_end

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    while (control := attach_control(registry.control_path(name), pid)) is None:
        if wait_for_end(pidfd, POLL_S):
            return 0
    view = ControlView(control)
    stop = start_metrics_server(
        port, lambda: (view.stats(), view.all_durations()), {"engine": name}, ()
    )
    while not wait_for_end(pidfd, 3600):
        pass
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(serve_named(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
