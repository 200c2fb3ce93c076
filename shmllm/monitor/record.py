"""Makes the record of an engine at one time, also if the engine is dead or cannot be read.

This module must not know how a record is shown, nor how figures are computed.
"""

from __future__ import annotations

import contextlib

from shmllm.errors import IpcError
from shmllm.ipc.histogram import Durations
from shmllm.ipc.layout import HISTOGRAM_BUCKETS
from shmllm.ipc.stats import Histogram, Stat
from shmllm.monitor.figures import Figures, figures
from shmllm.monitor.find import FoundEngine
from shmllm.monitor.sample import Sample, Watch

_NOTHING = Sample(
    time_ns=0,
    state="",
    model="",
    device="",
    precision="",
    speculation="",
    uptime_s=0.0,
    stats={stat.name.lower(): 0 for stat in Stat},
    durations={each: Durations([0] * HISTOGRAM_BUCKETS, 0) for each in Histogram},
    clients=(),
    errors=(),
)


def record_of(engine: FoundEngine) -> Figures:
    """The figures of an engine now, without those of an interval.

    If its segment cannot be read, `state` has the reason, and all other figures are None.
    """
    try:
        watch = Watch(engine)
    except IpcError as error:
        return dict.fromkeys(figures(engine, _NOTHING, None)) | {
            "name": engine.name,
            "state": str(error),
            "clients": [],
        }
    with contextlib.closing(watch):
        return figures(engine, watch.sample(), None)
