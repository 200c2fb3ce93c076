"""What a pool does with the clients of several engines at the same time: start, wait, end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.protocol import StartProgress
from shmllm.config.front_end import Progress
from shmllm.config.info import EngineInfo
from shmllm.ipc.output_waiter import OutputWaiter


def await_all(
    clients: Sequence[ChannelEngineClient], waiter: OutputWaiter, progress: StartProgress
) -> list[EngineInfo]:
    """Wait until all engines are ready, which load at the same time.

    Args:
        clients: the clients of equal engines.
        waiter: waits for the outputs of all of them.
        progress: the functions to call with the progress of all of them.

    Raises:
        EngineStartError: see `ChannelEngineClient.wait_ready`.
    """
    shares = _shares_of(progress, len(clients))
    while True:
        found = [client.poll_ready(share) for client, share in zip(clients, shares, strict=True)]
        infos = [info for info in found if info is not None]
        if len(infos) == len(clients):
            return infos
        starting = [c for c, info in zip(clients, found, strict=True) if info is None]
        waiter.wait(partial(_have_outputs, starting))


def _have_outputs(clients: Sequence[ChannelEngineClient]) -> bool:
    return any(client.has_outputs() for client in clients)


def wait_for_any(
    clients: Sequence[ChannelEngineClient],
    waiter: OutputWaiter,
    timeout_s: float,
    urgent_only: bool,
) -> bool:
    """Wait for an output of any engine; see `ClientChannel.wait`."""
    for client in clients:
        client.before_wait()
    has_data = [client.has_outputs for client in clients]
    has_urgent = [client.has_urgent_outputs for client in clients]
    return waiter.wait(
        lambda: any(each() for each in has_data),
        (lambda: any(each() for each in has_urgent)) if urgent_only else None,
        time.monotonic() + timeout_s,
    )


def stop_all(clients: Sequence[ChannelEngineClient]) -> None:
    """End all engines, or the connections to them."""
    for client in clients:
        client.begin_stop()
    for client in clients:
        client.stop()


def health_of(clients: Sequence[ChannelEngineClient]) -> str:
    """The states of all engines in words; see `EngineClient.health`."""
    states = [client.health() for client in clients]
    if len(set(states)) == 1:
        return states[0]
    return "; ".join(f"engine {index}: {state}" for index, state in enumerate(states))


def _shares_of(progress: StartProgress, count: int) -> list[StartProgress]:
    """What to call with the progress of each engine, so that `progress` gets that of all."""
    loads, captures = (
        [None] * count if call is None else _shares(call, count)
        for call in (progress.on_load, progress.on_capture)
    )
    return [StartProgress(*each) for each in zip(loads, captures, strict=True)]


def _shares(call: Progress, count: int) -> list[Progress]:
    done = [0] * count

    def share_of(index: int) -> Progress:
        def report(own: int, total: int) -> None:
            done[index] = own
            call(sum(done), count * total)

        return report

    return [share_of(index) for index in range(count)]
