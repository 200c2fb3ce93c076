"""`--metrics-port`: an engine's statistics as Prometheus text, for this machine only.

    python -m shmllm.cli.metrics NAME PID PORT

Owns the names under which statistics are shown, and the small process that shows those of
a named engine: it reads shared memory, and ends when the engine does. So no engine has a
socket, and nothing that a scraper does can hold one up.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from shmllm.ipc.stats import PHASES, Histogram

if TYPE_CHECKING:
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.histogram import Durations

ADDRESS = "127.0.0.1"
LOOK_S = 0.2

Statistics = Mapping[str, int]
Read = Callable[[], tuple[Statistics, Mapping[Histogram, "Durations"]]]

GAUGES = {
    "running": ("requests_running", "Requests that are being computed."),
    "waiting": ("requests_waiting", "Requests that wait to be computed."),
    "paused": ("paused", "1 while the engine is paused or sleeps."),
    "asleep": ("asleep", "Sum of what sleeps: scheduling 1, kv_cache 2, weights 4, missing 8."),
    "kv_blocks_used": ("kv_blocks_used", "Blocks of keys and values in use."),
    "kv_blocks_total": ("kv_blocks", "Blocks of keys and values there are."),
}
COUNTERS = {
    "requests_finished": ("requests_finished", "Requests that have ended."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were started."),
    "generated_tokens": ("generated_tokens", "Tokens that were sampled."),
    "prefix_query_tokens": ("prefix_cache_queries", "Prompt tokens looked for in the cache."),
    "prefix_hit_tokens": ("prefix_cache_hits", "Prompt tokens found there, recomputing aside."),
    "preemptions": ("preemptions", "Times that a request gave its blocks back."),
    "steps": ("steps", "Steps of the engine."),
    "times_parked": ("parks", "Times that the engine slept."),
}


HISTOGRAMS = {
    Histogram.TTFT: ("time_to_first_token_seconds", "From arrival to the published first token."),
    Histogram.ITL: ("inter_token_latency_seconds", "From one token of a request to the next."),
    Histogram.STEP: ("step_seconds", "From a step's schedule to its published outputs."),
}
# Powers of two in nanoseconds: 0.26 ms to 69 s.
FIRST_BOUND_BITS, LAST_BOUND_BITS = 18, 36


class EngineCollector:
    """What a scrape is answered with.

    Args:
        read: statistics and durations of now; raises what `errors` names when they are gone.
        labels: of every sample.
        errors: while these are raised, there are no samples.
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
        """Metric families of prometheus_client."""
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
        usage = gauge("shmllm_kv_cache_usage_ratio", "Blocks in use.", labels=names)
        usage.add_metric(values, found["kv_blocks_used"] / max(found["kv_blocks_total"], 1))
        yield usage
        phases = counter(
            "shmllm_phase_seconds", "Where the engine's time went.", labels=[*names, "phase"]
        )
        for phase in PHASES:
            if (spent_ns := found.get(f"{phase}_ns")) is not None:
                phases.add_metric([*values, phase], spent_ns / 1e9)
        yield phases
        for histogram, counted in durations.items():
            yield self._histogram(core.HistogramMetricFamily, histogram, counted)

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
    """Raise what a person can mend, before anything is started."""
    if port is None:
        return
    try:
        import_module("prometheus_client")
    except ImportError:
        raise click.UsageError(
            "--metrics-port needs prometheus_client: pip install 'shmllm[metrics]'"
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
    """Answer scrapes in a thread. Returns what ends that."""
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
    """Arguments to start the process with that shows the statistics of a named engine."""
    return [sys.executable, "-m", "shmllm.cli.metrics", name, str(pid), str(port)]


def serve_named(name: str, pid: int, port: int) -> int:
    """Show the statistics of the engine `name`, which process `pid` is or becomes, until it
    ends."""
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.liveness import wait_for_end

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    while (control := _attach(name, pid)) is None:
        if wait_for_end(pidfd, LOOK_S):
            return 0
    view = ControlView(control)
    stop = start_metrics_server(
        port, lambda: (view.stats(), view.all_durations()), {"engine": name}, ()
    )
    while not wait_for_end(pidfd, 3600):
        pass
    stop()
    return 0


def _attach(name: str, pid: int) -> Any:
    """The engine's control segment; None while it is not there or another's."""
    from shmllm.errors import IpcError
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.layout import SegmentKind

    try:
        control = registry.attach(registry.control_path(name), SegmentKind.CONTROL, name)
    except IpcError:
        return None
    view: ControlView = ControlView(control)
    is_it = view.engine_pid == pid
    view.close()
    if is_it:
        return control
    control.close()
    return None


if __name__ == "__main__":
    sys.exit(serve_named(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
