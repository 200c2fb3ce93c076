"""The trainer's end: which calls it makes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.trainers import DictSource

from shmllm.errors import RequestError
from shmllm.trainer import (
    GlooTrainerInitInfo,
    ModuleSource,
    NCCLTrainerInitInfo,
    ParamMeta,
    ShmTrainerInitInfo,
    WeightTransferTrainerFactory,
)

make = WeightTransferTrainerFactory.trainer_init


class Llm:
    """An `LLM` that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.weights: dict[str, Any] = {}

    def collective_rpc(self) -> None:
        """It makes this an `LLM`."""

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, weights: Any) -> None:
        self.calls.append("update")
        self.weights.update(weights)

    def finish_weight_update(self, weight_version: Any = None) -> None:
        self.calls.append(("finish", weight_version))

    def abandon_weight_update(self) -> None:
        self.calls.append("abandon")


def test_an_update_is_three_calls() -> None:
    llm = Llm()
    sender = make(ShmTrainerInitInfo(), client=llm, source=ModuleSource(torch.nn.Linear(2, 3)))
    sender.send_weights("v")
    sender.shutdown()
    assert llm.calls == ["start", "update", ("finish", "v")]
    assert {name: tuple(each.shape) for name, each in llm.weights.items()} == {
        "weight": (3, 2),
        "bias": (3,),
    }
    assert not any(each.requires_grad for each in llm.weights.values())


def test_other_ranks_iterate_and_call_nobody() -> None:
    seen: list[int] = []
    source = DictSource({"a": torch.ones(1), "b": torch.ones(1)}, seen.append)
    for info in (ShmTrainerInitInfo(rank=1), GlooTrainerInitInfo("10.0.0.1", 1, 2, rank=3)):
        sender = make(info, client=None, source=source)
        sender.send_weights()
        sender.shutdown()
    assert seen == [0, 1, 0, 1]


class Wrong(DictSource):
    """A source whose metadata are others."""

    def __init__(self, meta: list[ParamMeta]) -> None:
        super().__init__({"a": torch.ones(2), "b": torch.ones(1)})
        self.meta = meta

    def metadata(self) -> list[ParamMeta]:
        return self.meta


A, B = ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (1,))


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ([B, A], "name='b'.*but it has.*name='a'"),
        ([A], "say None, but it has.*name='b'"),
        ([A, B, A], "ended before a"),
        ([ParamMeta("a", torch.float16, (2,)), B], "float16.*float32"),
    ],
)
def test_a_source_with_other_metadata_abandons_the_update(
    meta: list[ParamMeta], words: str
) -> None:
    llm = Llm()
    with pytest.raises(RequestError, match=words):
        make(ShmTrainerInitInfo(), client=llm, source=Wrong(meta)).send_weights()
    assert llm.calls == ["start", "update", "abandon"]


def test_what_cannot_work_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coroutines(Llm):
        async def update_weights(self, weights: Any) -> None:
            """As in AsyncLLM."""

    source = DictSource({})
    for info, client, words in (
        (ShmTrainerInitInfo(), Coroutines(), "no coroutine"),
        (ShmTrainerInitInfo(), object(), "must be an LLM or have a method"),
        (GlooTrainerInitInfo("127.0.0.1", 0, 1), Llm(), "world_size must be from 2"),
        (object(), Llm(), "is not one of shm, ipc, nccl, gloo"),
    ):
        with pytest.raises(RequestError, match=words):
            make(info, client=client, source=source)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="needs a source"):
        make(ShmTrainerInitInfo(), client=Llm())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="needs a GPU"):
        make(NCCLTrainerInitInfo("127.0.0.1", 0, 2), client=Llm(), source=source)
