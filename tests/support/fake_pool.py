"""A pool of engines without processes, with its front end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.fake_members import FakeMember, FakeWaiter, token_of

from shmllm.client.pool import EnginePool
from shmllm.client.revival import Revival
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import NoBackend
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

ROLES: dict[str, Any] = {
    "shared_kv_cache_bytes": 1000,
    "num_blocks": 1000,
    "kv_cache_bytes": 1000,
    "max_model_len": 500,
}
"""What engines with roles report, beside the role."""


class Pool:
    """A pool with its front end.

    Attributes:
        started: the engines that were started again.
        starts_ready: whether they are ready at once.
    """

    def __init__(
        self,
        count: int = 2,
        is_revived: bool = False,
        starts_ready: bool = True,
        roles: Sequence[str] = (),
        **changes: Any,
    ) -> None:
        self.starts_ready = starts_ready
        self.waiter = FakeWaiter()
        self.of_each = [ROLES | {"role": role} for role in roles] or [changes] * count
        self.members = [FakeMember(self.waiter, **each) for each in self.of_each]
        self.started: list[FakeMember] = []
        members: list[Any] = [*self.members]
        start: Any = self.start
        self.client = EnginePool(members, Revival(start) if is_revived else None)
        self.client.wait_ready()
        self.dispatcher = Dispatcher(self.client, OutputProcessor(Tokenizer(NoBackend())))
        self.group = RequestGroup()
        self.states: list[RequestState] = []

    def start(self, index: int) -> FakeMember:
        self.started.append(FakeMember(self.waiter, **self.of_each[index]))
        self.started[-1].is_ready = self.starts_ready
        return self.started[-1]

    def submit(
        self,
        count: int = 1,
        max_tokens: int | None = 5,
        prompt: Sequence[int] = (5, 6, 7),
        **params: Any,
    ) -> None:
        own = SamplingParams(max_tokens=max_tokens, detokenize=False, **params)
        for _ in range(count):
            request = PreparedRequest(None, own, EngineCoreRequest(-1, [*prompt], own))
            self.states += self.dispatcher.submit(self.group, request, len(self.states))

    def prepared(self, prompt: Sequence[int]) -> tuple[RequestGroup, PreparedRequest]:
        """A request of another caller, with its group."""
        params = SamplingParams(max_tokens=5, detokenize=False)
        request = EngineCoreRequest(-1, [*prompt], params)
        return RequestGroup(), PreparedRequest(None, params, request)

    def run(self) -> None:
        for _ in range(1000):
            if not self.group.num_open:
                break
            self.dispatcher.collect(self.group, 0.001)
        assert not self.group.num_open

    def check_rows(self, max_tokens: int = 5) -> None:
        for state in self.states:
            assert state.error is None
            assert state.token_ids == [token_of(state.number, k) for k in range(max_tokens)]
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is left of requests that have ended."""
        flights = self.client._flights
        assert not flights._flights
        assert not flights._phases._under_way
        assert not any(flights._router.queued(k) for k in range(len(self.members)))
