"""CUDA IPC handles: what a trainer sends, and what an engine refuses. A fake stands in for CUDA."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.trainers import DictSource

from shmllm.errors import RequestError
from shmllm.trainer import IPCTrainerInitInfo, WeightTransferTrainerFactory
from shmllm.transfer.ipc import Receiver, Sender
from shmllm.transfer.ipc_handle import FIELDS, handle_on, plain_handles
from shmllm.transfer.receiver import Place
from shmllm.transfer.update_info import merged

UUID = "GPU-1"
CPU = torch.device("cpu")


class FakeSharing:
    """Tensors of this process, found by the number that their handle contains."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.num_waits = 0

    def uuid(self, device: Any) -> str:
        return UUID

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self.tensors.append(tensor)
        return arguments_of(tensor, len(self.tensors) - 1)

    def rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        assert arguments[0] is torch.Tensor
        assert arguments[4] is torch.UntypedStorage
        assert isinstance(arguments[5], torch.dtype)
        return self.tensors[int.from_bytes(arguments[7][:1], "big")]

    def synchronize(self, device: Any) -> None:
        self.num_waits += 1


def arguments_of(tensor: torch.Tensor, number: int = 0, device: int = 3) -> tuple[Any, ...]:
    """What reduce_tensor makes of a tensor of a GPU."""
    handle = bytes([number]) + bytes(65)
    storage = (torch.UntypedStorage, tensor.dtype, device, handle, tensor.nbytes, 0, False)
    view = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset())
    return (*view, *storage, b"counter", 0, b"event", False)


class Engine:
    """A client that is the engine, too: what it gets goes through JSON, as in a message."""

    def __init__(self, sharing: FakeSharing) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.num_updates = 0
        self.finished: list[Any] = []
        place = Place("ipc", CPU, 1, self._put)
        self.receiver = Receiver(place, sharing)

    def _put(self, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.weights[name] = tensor.reshape(shape).clone()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.open(init_info)

    def start_weight_update(self) -> None:
        self.finished.append(None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = update_info | {"ipc_handles": plain_handles(update_info["ipc_handles"])}
        self.receiver.receive(self.receiver.read_update(json.loads(json.dumps(info))))
        assert self.receiver.progress() == 0
        self.num_updates += 1

    def finish_weight_update(self, weight_version: Any = None) -> None:
        self.finished[-1] = weight_version


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> FakeSharing:
    fake = FakeSharing()
    monkeypatch.setattr(Sender, "sharing", fake)
    monkeypatch.setattr(Sender, "reduce", staticmethod(fake.reduce))
    return fake


@pytest.mark.parametrize("packed", [True, False])
def test_tensors_arrive_in_calls_of_limited_size(sharing: FakeSharing, packed: bool) -> None:
    weights = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "matrix": torch.randn(5, 7),
        "empty": torch.empty(0, 4),
        "large": torch.randn(64).double(),
        "scalar": torch.tensor(2.5),
    }
    engine = Engine(sharing)
    sender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(packed, 256), client=engine, source=DictSource(weights)
    )
    sender.send_weights(version=2)
    assert engine.finished == [2]
    assert engine.num_updates == 3
    assert {*engine.weights} == {*weights}
    for name, weight in weights.items():
        assert torch.equal(engine.weights[name], weight), name
    assert sharing.num_waits >= 2 * engine.num_updates  # both ends wait for their copies


def test_handles_survive_json_and_get_the_index_of_the_engines_gpu() -> None:
    tensor = torch.randn(3, 4)
    handles = {UUID: arguments_of(tensor, device=3), "GPU-2": arguments_of(tensor, device=4)}
    sent = json.loads(json.dumps(plain_handles(handles)))
    rebuilt = handle_on(sent, "GPU-2", 0)
    expected = list(arguments_of(tensor, device=0))
    expected[1], expected[2] = (3, 4), (4, 1)
    assert list(rebuilt) == expected


def test_a_handle_of_another_gpu_is_refused_with_their_names() -> None:
    handles = plain_handles({UUID: arguments_of(torch.ones(1))})
    with pytest.raises(RequestError, match=r"GPU GPU-7; they are of: GPU-1"):
        handle_on(handles, "GPU-7", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("handle", "xyz"), ("handle", 7), ("size", [-1]), ("offset", -1), ("storage_bytes", 1.5),
     ("dtype", "torch.float33"), ("requires_grad", 1), ("stride", "ab")],
)  # fmt: skip
def test_a_handle_that_is_not_valid_is_refused_before_torch_sees_it(field: str, value: Any) -> None:
    (plain,) = plain_handles([{UUID: arguments_of(torch.ones(1))}])
    plain[UUID][[name for name, _ in FIELDS].index(field)] = value
    with pytest.raises(RequestError, match="IPC handle"):
        handle_on(plain, UUID, 0)


@pytest.mark.parametrize("handles", [7, [7], {UUID: 7}, {UUID: (1, 2)}])
def test_what_is_no_handle_is_refused_by_the_front_end(handles: Any) -> None:
    with pytest.raises(RequestError, match=r"ipc_handles must|15 arguments"):
        plain_handles(handles)


def update(**changes: Any) -> dict[str, Any]:
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
    return info | {"ipc_handles": [{UUID: arguments_of(torch.ones(2))}]} | changes


@pytest.mark.parametrize(
    ("packed", "info", "words"),
    [
        (False, update(ipc_handles=None), "lacks ipc_handles"),
        (False, update(ipc_handles=[]), "names has 1 entries, but ipc_handles has 0"),
        (False, update(ipc_handles={}), "a list with a dict for each tensor"),
        (True, update(), "one dict"),
        (True, update(ipc_handles={}), "need tensor_sizes"),
        (True, update(ipc_handles={}, tensor_sizes=[]), "tensor_sizes has 0"),
        (True, update(ipc_handles={}, tensor_sizes=[9]), "8 bytes by its shape, 9"),
        (True, update(ipc_handles={}, tensor_size=[8]), "nearest is 'tensor_sizes'"),
    ],
)
def test_lists_that_do_not_fit_each_other_are_refused(
    sharing: FakeSharing, packed: bool, info: dict[str, Any], words: str
) -> None:
    receiver = Engine(sharing).receiver
    receiver.open({"packed": packed})
    with pytest.raises(RequestError, match=words):
        receiver.read_update(info)


def test_a_buffer_or_a_tensor_of_another_size_is_refused(sharing: FakeSharing) -> None:
    engine = Engine(sharing)
    small = {UUID: sharing.reduce(torch.ones(3, dtype=torch.uint8))}
    engine.receiver.open({"packed": True})
    with pytest.raises(RequestError, match="the buffer has 3 bytes, its tensors 8"):
        engine.update_weights(update(ipc_handles=small, tensor_sizes=[8]))
    engine.receiver.open({"packed": False})
    with pytest.raises(RequestError, match="the handle of a is of 3 elements"):
        engine.update_weights(update(ipc_handles=[small]))
    assert engine.weights == {}


def test_an_engine_without_a_gpu_has_no_handles() -> None:
    receiver = Receiver(Place("ipc", CPU, 1, lambda *given: None))
    with pytest.raises(RequestError, match="needs an engine on a GPU"):
        receiver.open({})
    with pytest.raises(RequestError, match="init_weight_transfer_engine first"):
        receiver.read_update(update())


def test_the_handles_of_several_workers_become_one_dict() -> None:
    one, two = update(ipc_handles=[{"a": 1}]), update(ipc_handles=[{"b": 2}])
    assert merged([one, two])["ipc_handles"] == [{"a": 1, "b": 2}]
    packed = [update(ipc_handles={"a": 1}), update(ipc_handles={"b": 2})]
    assert merged(packed)["ipc_handles"] == {"a": 1, "b": 2}
    for wrong in ([], [7], "text", [one, update(names=["b"])], [one, packed[0]]):
        with pytest.raises(RequestError):
            merged(wrong)
