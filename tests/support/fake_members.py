"""Engines of a pool as the pool sees them, without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from support.fakes import info

from shmllm.client.flights import aborted
from shmllm.client.protocol import EngineOutput
from shmllm.errors import EngineDeadError, RequestError
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.outputs.sleep_report import OwnedBytes
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method, Rejected
from shmllm.wire.rpc import RpcCall


def token_of(number: int, position: int) -> int:
    """What every engine samples there for the request of a number."""
    return (7 * number + 3 * position) % 500


def report(asleep: Sequence[str]) -> dict[str, Any]:
    owned = [1] * len(dataclasses.fields(OwnedBytes))
    values = dataclasses.asdict(OwnedBytes(*owned))
    return {
        "report": {
            "before": values,
            "after": values,
            "asleep": asleep,
            "num_missing": 0,
            "num_kept": 1,
            "seconds": 1.0,
        },
        "warning": "",
    }


class FakeWaiter:
    """A waiter that never waits."""

    def wake(self) -> None:
        pass

    def wait(self, has_data: Callable[[], bool], *_: Any) -> bool:
        return has_data()


class FakeWorkerCall:
    """A call on the worker of an engine, which runs it when the result is awaited.

    Attributes:
        events: what happens to the calls of the engine, in words.
    """

    def __init__(self, member: FakeMember, call: RpcCall, timeout_s: float | None) -> None:
        self.events = member.events
        self._member = member
        self._call = call
        self._timeout_s = timeout_s

    def prepare(self) -> None:
        if self._member.is_dead:
            raise EngineDeadError("it died")
        self.events.append("prepare")
        if self._member.problem is not None:
            raise self._member.problem

    def send(self) -> None:
        self.events.append("send")

    def result(self) -> Any:
        if self._member.is_dead:
            raise EngineDeadError("it died")
        return self._member.run_on_worker(self._call, self._timeout_s)

    def end(self) -> None:
        self.events.append("end")


class FakeMember:
    """The client of an engine. One poll is one step, which gives each request a token.

    Attributes:
        requests: those that run, by number.
        num_sent: by number, how many tokens of the request were sent.
        is_dead: whether the engine has ended: what it sent before arrives.
        is_ending: see `ChannelEngineClient.is_ending`.
        is_ready: whether its start is over.
        is_held: whether it makes no steps.
        num_waited_threads: the compute threads beside which the front end waits.
        calls: what was asked, with its argument.
        answers: to what is asked, or the exception to raise; None to all else.
        counters: what `stats` returns; empty: the number of requests.
        ring: as `ChannelEngineClient.ring`; a request has one byte.
        run_on_worker: what its worker does.
        problem: why no call on its worker can be transmitted, or None.
        events: what happened to those, in words.
        open_calls: as `ChannelEngineClient.open_calls`.
        refusal: the message with which it refuses requests; None: it takes them.
    """

    def __init__(self, waiter: FakeWaiter, version: int = 0, **changes: Any) -> None:
        self.info = info(**{"vocab_size": 600} | changes)
        self.waiter = waiter
        self.pid = id(self)
        self.sharing: Any = None
        self.connection = self.seed = 1
        self.on_trace: Any = None
        self.recorder: object = None
        self.requests: dict[int, EngineCoreRequest] = {}
        self.num_sent: dict[int, int] = {}
        self.is_dead = self.is_ending = self.is_closed = False
        self.is_ready = True
        self.is_held = False
        self.num_waited_threads = 0
        self.calls: list[tuple[Method, Any]] = []
        self.answers: dict[Method, Any] = {
            Method.GET_WEIGHT_VERSION: version,
            Method.PAUSE: 0,
            Method.RESUME: True,
            Method.HOLD_LORA: True,
        }
        self.refusal: str | None = None
        self.counters: dict[str, int] = {}
        self.ring = SimpleNamespace(position=0, consumed_position=0)
        self.run_on_worker: Callable[[RpcCall, float | None], Any] = lambda call, timeout_s: None
        self.problem: Exception | None = None
        self.events: list[str] = []
        self.open_calls: set[int] = set()
        self._inbox: list[EngineOutput] = []

    def poll_ready(self, progress: object = None) -> Any:
        self.check_alive()
        return self.info if self.is_ready else None

    def add(self, request: EngineCoreRequest) -> None:
        assert request.number not in self.num_sent, "sent twice"
        self.ring.position += 1
        if self.is_dead:
            return  # the ring has room
        self.ring.consumed_position = self.ring.position
        if self.refusal is not None:
            self._inbox.append(Rejected(request.number, self.refusal))
            return
        self.requests[request.number], self.num_sent[request.number] = request, 0

    def abort(self, numbers: Sequence[int]) -> None:
        known = [each for each in numbers if self.requests.pop(each, None) is not None]
        if known and not self.is_dead:
            self._inbox.append(aborted(known))

    def end_by_itself(self) -> None:
        """Abort all requests and end."""
        self.is_ending = True
        self.abort([*self.requests])
        self.is_dead = True

    def tell(self, event: EngineOutput) -> None:
        """Send an event."""
        self._inbox.append(event)

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        if self.requests and not self.is_dead and not self.is_held:
            self._inbox.append(self._step())
        return self._inbox

    def _step(self) -> OutputColumns:
        numbers = [*self.requests]
        is_first = [place for place, number in enumerate(numbers) if not self.num_sent[number]]
        tokens = [token_of(number, self.num_sent[number]) for number in numbers]
        finishes: list[int] = []
        for number in numbers:
            self.num_sent[number] += 1
            params = self.requests[number].params
            assert isinstance(params, SamplingParams)
            has_ended = self.num_sent[number] >= (params.max_tokens or 1)
            finishes.append(FinishReason.LENGTH if has_ended else FinishReason.NONE)
            if has_ended:
                del self.requests[number]
        return OutputColumns(
            numbers=numbers,
            counts=[1] * len(numbers),
            finishes=finishes,
            token_ids=tokens,
            cached_rows=is_first,
            cached_counts=[0] * len(is_first),
        )

    def has_outputs(self) -> bool:
        runs = not self.is_dead and not self.is_held
        return bool(self._inbox) or (bool(self.requests) and runs)

    has_urgent_outputs = has_outputs

    def before_wait(self) -> None:
        pass

    def check_alive(self) -> None:
        if self.is_dead and not self._inbox:
            raise EngineDeadError("it died")

    def call(self, method: Method, argument: Any = None) -> Any:
        if self.is_dead:
            raise EngineDeadError("it died")
        self.calls.append((method, argument))
        answer = self.answers.get(method)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def worker_call(self, call: RpcCall, timeout_s: float | None) -> FakeWorkerCall:
        return FakeWorkerCall(self, call, timeout_s)

    def trace(self, recorder: object) -> None:
        self.recorder = recorder

    def stats(self) -> dict[str, int]:
        return self.counters or {"running": len(self.requests)}

    def health(self) -> str:
        return "dead" if self.is_dead else "ready"

    def wake(self) -> None:
        self.waiter.wake()

    def begin_stop(self) -> None:
        pass

    stop = begin_stop

    def set_policy(self, num_threads: int) -> None:
        self.num_waited_threads = num_threads

    def close(self) -> None:
        self.is_closed = True


REFUSAL = RequestError("no")
