"""Weight updates through memory that front end and engine share on a GPU, in real processes.

The GPU is `support.fake_sharing`; all else is what runs with a real one (tests/gpu).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import assert_idle, named_engine, tensor_bytes
from support.fake_sharing import UUID, FakeSharing, num_mappings, share_memory
from support.programs import children, environment_of_test_files, kill, read_line, start_at_go
from support.waiting import wait_until

from shmllm import LLM, RequestError, SamplingParams
from shmllm.errors import CallError, CallOrderError
from shmllm.frontend.weights.push import WeightPush
from shmllm.ipc.device_memory import LocalSharing
from shmllm.wire import weight_bucket
from shmllm.wire.messages import Method

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = [5, 7, 11, 13] * 9
TESTS = str(Path(__file__).parents[1])
PREFACE = f"""
sys.path.insert(0, {TESTS!r})
from support.fake_sharing import FakeSharing
import shmllm.engine.weight_updates
shmllm.engine.weight_updates.CudaSharing = FakeSharing
"""
"""Gives a named engine the fake GPU."""


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    names = llm.collective_rpc("list_weights")[0]
    return {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}


def half_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight * 0.5 for name, weight in weights.items()}


def put_on_gpu(llm: LLM, sharing: Any = None) -> Any:
    """From now on the front end takes tensors for tensors on the engine's GPU."""
    sharing = sharing or FakeSharing()
    info = dataclasses.replace(llm.facts, device_uuid=UUID)
    llm._weight_push = WeightPush(llm._dispatcher, info, sharing)
    return sharing


def mappings(llm: LLM) -> int:
    found: int = llm.collective_rpc(num_mappings)[0]
    return found


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        llm.collective_rpc(share_memory)
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """An engine with the fake GPU. A test must leave the weights as they were."""
    before = tokens(engine)
    yield engine
    assert mappings(engine) == 0
    engine.start_weight_update()  # none is under way
    engine.abandon_weight_update()
    assert tokens(engine) == before
    assert_idle(engine)


@pytest.fixture
def sharing(llm: LLM) -> FakeSharing:
    return put_on_gpu(llm)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2 MiB: the bundled model needs several, and its table is cut."""
    monkeypatch.setattr(weight_bucket, "DEVICE_BUCKET_BYTES", 2**21)


@pytest.mark.usefixtures("small_buckets")
def test_tokens_are_those_of_an_update_through_host_memory(llm: LLM) -> None:
    weights = weights_of(llm)
    llm.update_weights(half_of(weights))
    expected, values = tokens(llm), weights_of(llm)
    llm.update_weights(weights)
    assert tokens(llm) != expected
    sharing = put_on_gpu(llm)
    llm.update_weights(half_of(weights))
    assert sharing.log.count("export") == 1
    assert sharing.log[-1] == "free"
    assert tokens(llm) == expected
    found = weights_of(llm)
    assert all(torch.equal(found[name], values[name]) for name in values)
    llm.update_weights(iter(weights.items()))


def test_the_engine_maps_the_memory_once_and_only_during_an_update(
    llm: LLM, sharing: FakeSharing
) -> None:
    weights = weights_of(llm)
    items = list(weights.items())
    llm.start_weight_update()
    for part in (items[:5], items[5:]):
        llm.update_weights(part)
        assert mappings(llm) == 1
    llm.finish_weight_update()
    assert mappings(llm) == 0
    assert sharing.log.count("export") == sharing.log.count("free") == 1


def test_no_shared_memory_of_the_host_is_used(
    llm: LLM, sharing: FakeSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(llm)
    monkeypatch.setattr(llm._client, "claim_bucket", None)
    llm.update_weights(weights)


def test_tensors_of_both_kinds_make_one_update(llm: LLM, sharing: FakeSharing) -> None:
    weights = weights_of(llm)
    mixed = {
        name: (weight * 0.5).float().numpy() if index % 2 else weight * 0.5
        for index, (name, weight) in enumerate(weights.items())
    }
    llm.update_weights(mixed)
    found = weights_of(llm)
    assert all(torch.equal(found[name], weight * 0.5) for name, weight in weights.items())
    llm.update_weights(weights)


@pytest.mark.parametrize("parts", [True, False], ids=["three calls", "one call"])
def test_a_wrong_update_changes_nothing_and_frees_the_memory(
    llm: LLM, sharing: FakeSharing, parts: bool
) -> None:
    version, before, weights = llm.get_weight_version(), tokens(llm), weights_of(llm)
    wrong = {
        **half_of(weights),
        "no.such.weight": torch.ones(2),
        "model.norm.weight": torch.ones(3),
        "model.embed_tokens.weight": weights["model.embed_tokens.weight"] * float("nan"),
    }
    if parts:
        llm.start_weight_update()
    with pytest.raises(RequestError) as caught:
        llm.update_weights(wrong)
    for name in ("no.such.weight", "model.norm.weight has shape [3]", "not finite"):
        assert name in str(caught.value)
    assert sharing.log[-1] == "free"
    assert (llm.get_weight_version(), tokens(llm)) == (version, before)


def _num_in_place(worker: Any) -> int:
    """Runs in the engine: the number of weights that are staged in the memory of the model."""
    staged = worker._core.weights._staged
    weights = worker.model.named_weights()
    return sum(
        place.data_ptr() == weights[name][0].data_ptr() for name, place in staged._places.items()
    )


def test_after_sleep_at_level_2_weights_are_written_where_they_belong(
    llm: LLM, sharing: FakeSharing
) -> None:
    weights = weights_of(llm)
    for num_expected in (0, len(weights)):
        llm.start_weight_update()
        llm.update_weights(weights)
        assert llm.collective_rpc(_num_in_place)[0] == num_expected
        llm.finish_weight_update()
        if not num_expected:
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
    llm.wake_up()


def test_a_failed_update_after_sleep_leaves_the_weights_missing(
    llm: LLM, sharing: FakeSharing
) -> None:
    weights = weights_of(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    with pytest.raises(RequestError, match="finite"):
        llm.update_weights({**weights, "model.norm.weight": torch.full((256,), float("inf"))})
    assert not llm.wake_up()
    with pytest.raises(RequestError, match="weights are missing"):
        tokens(llm)
    llm.update_weights(weights)


def test_an_exception_of_the_generator_ends_the_mapping(llm: LLM, sharing: FakeSharing) -> None:
    weights = weights_of(llm)

    def some() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(half_of(weights).items())[:9]
        raise KeyError("x")

    with pytest.raises(KeyError):
        llm.update_weights(some())
    assert sharing.log[-1] == "free"


@pytest.mark.parametrize("reason", ["no export", "no handle"])
def test_without_sharing_the_host_path_is_used_and_logged_once(
    llm: LLM, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(llm)
    sharing = put_on_gpu(llm)
    if reason == "no export":
        sharing.refusal = reason
    else:
        wrong = sharing.export(2**21, None)
        wrong.handle = "/proc/self/no handle"
        sharing.export = lambda *_: wrong  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "shmllm"):
        for _ in range(2):
            llm.update_weights(half_of(weights))
    found = weights_of(llm)
    assert all(torch.equal(found[name], weight * 0.5) for name, weight in weights.items())
    llm.update_weights(weights)
    (record,) = [each for each in caplog.records if "through host memory" in each.message]
    assert reason in record.message


def test_an_engine_in_this_process_gets_the_memory_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSharing, "uuid", lambda *_: UUID)
    monkeypatch.setattr(LocalSharing, "synchronize", lambda *_: None)
    with LLM(multiprocess=False, **OPTIONS) as llm:
        before, weights = tokens(llm), weights_of(llm)
        put_on_gpu(llm, llm._client.sharing)
        monkeypatch.setattr(llm._client, "claim_bucket", None)  # no bucket in host memory
        llm.update_weights(half_of(weights))
        found = weights_of(llm)
        assert all(torch.equal(found[name], weight * 0.5) for name, weight in weights.items())
        with pytest.raises(RequestError, match="no weight"):
            llm.update_weights({**weights, "no.such.weight": torch.ones(1)})
        llm.update_weights(weights)
        assert tokens(llm) == before


NORM = ["model.norm.weight", "float32", [256], 0, 256, 0]
BAD = [
    *([*NORM[:5], 2**21 - 64], [*NORM[:5], 2**62], [*NORM[:5], 3], [*NORM[:5], -64]),
    *(
        ["model.norm.weight", "int", [256], 0, 256, 0],
        [*NORM[:4], 2**40, 0],
        [*NORM[:3], 0, 1.5, 0],
    ),
    *(3, [], "abcdef", {}),
]


def test_wrong_pieces_and_calls_end_nothing(llm: LLM) -> None:
    call = llm._dispatcher.call
    sharing = FakeSharing()
    memory = sharing.export(2**21, None)
    lent = {"handle": memory.handle, "num_bytes": 2**21}
    with pytest.raises(CallOrderError, match="start one first"):
        call(Method.LEND_MEMORY, lent)
    with pytest.raises(CallOrderError, match="start one first"):
        call(Method.STAGE_LENT, [NORM])
    call(Method.START_WEIGHTS)
    with pytest.raises(CallOrderError, match="no memory was lent"):
        call(Method.STAGE_LENT, [NORM])
    for handle in ("", "no handle", 5, None, ["x"], "/dev/null"):
        with pytest.raises((RequestError, CallError)):
            call(Method.LEND_MEMORY, {**lent, "handle": handle})
    sizes = [{**lent, "num_bytes": size} for size in (-1, 0, 1.5, 2**22, 2**29, True)]
    for argument in (None, [], {"handle": memory.handle}, *sizes):
        with pytest.raises((RequestError, CallError)):
            call(Method.LEND_MEMORY, argument)
    call(Method.LEND_MEMORY, lent)
    call(Method.LEND_MEMORY, lent)
    assert mappings(llm) == 1
    for piece in BAD:
        with pytest.raises(CallError, match="bucket of weights"):
            call(Method.STAGE_LENT, [piece])
    for pieces in (None, 3, {"a": 1}):
        with pytest.raises(CallError):
            call(Method.STAGE_LENT, pieces)
    call(Method.STAGE_LENT, [[*NORM[:2], [255], 0, 255, 0], ["x", *NORM[1:]]])
    with pytest.raises(RequestError, match=r"norm\.weight has shape.*no weight 'x'"):
        call(Method.FINISH_WEIGHTS, {})
    memory.close()


TRAINER = """
import os, signal, sys
import dataclasses
import numpy, torch
from support.fake_sharing import UUID, FakeSharing
from shmllm import LLM
from shmllm.frontend.weights.push import WeightPush

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def train(where):
    llm = LLM.attach(sys.argv[1])
    sharing = FakeSharing()
    llm._weight_push = WeightPush(
        llm._dispatcher, dataclasses.replace(llm.facts, device_uuid=UUID), sharing)
    weights = {n: torch.ones(shape, dtype=getattr(torch, dtype))
               for n, (dtype, shape) in llm.collective_rpc("list_weights")[0].items()}

    def halves():
        for index, (n, weight) in enumerate(weights.items()):
            if where == "generator" and index == len(weights) // 2:
                kill()
            yield n, weight * 0.5

    llm.start_weight_update()
    if where == "lent":
        call = llm._dispatcher.call
        memory = sharing.export(2**21, None)
        call(15, {"handle": memory.handle, "num_bytes": 2**21})
        kill()
    llm.update_weights(halves())
    if where == "sent":
        kill()
    if where == "asked":
        import threading
        threading.Timer(0.0, kill).start()
    for _ in range(10**6):
        llm.update_weights(halves())

print("ready", flush=True)
sys.stdin.readline()
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            train(line.strip())
        finally:
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""A child for each line that says where it is killed: only their parent imports torch."""


@contextmanager
def trainers(name: str) -> Iterator[Callable[[str], tuple[int, Callable[[], int]]]]:
    """A function that starts a trainer of this engine, and returns its pid and what waits for its
    exit code."""
    parent = start_at_go(TRAINER, name, env=environment_of_test_files())

    def start(where: str) -> tuple[int, Callable[[], int]]:
        assert parent.stdin is not None
        parent.stdin.write(f"{where}\n".encode())
        parent.stdin.flush()
        return int(read_line(parent)), lambda: int(read_line(parent))

    try:
        yield start
    finally:
        for pid in children(parent.pid):
            os.kill(pid, signal.SIGKILL)
        kill(parent)


@pytest.mark.slow
def test_a_trainer_killed_in_the_middle_leaves_no_mapping_and_the_old_weights(
    tmp_path: Path,
) -> None:
    with (
        named_engine(tmp_path, PREFACE, allow_callables=True) as (name, _),
        LLM.attach(name) as llm,
        trainers(name) as start_trainer,
    ):
        before, held = tokens(llm), tensor_bytes(llm)
        for where in ("lent", "generator", "sent", "asked", "outside"):
            pid, exit_code = start_trainer(where)
            if where == "outside":
                wait_until(lambda: mappings(llm) == 1, "the engine maps the memory")
                os.kill(pid, signal.SIGKILL)
            assert exit_code() == -signal.SIGKILL
            wait_until(lambda: mappings(llm) == 0, f"the mapping ends ({where})")
            assert (llm.get_weight_version(), tokens(llm)) == (0, before), where
            assert tensor_bytes(llm) == held, where
        sharing, weights = put_on_gpu(llm), weights_of(llm)
        llm.update_weights(half_of(weights))
        assert sharing.log[-1] == "free"
        assert llm.get_weight_version() == 1


@pytest.mark.slow
def test_two_front_ends_cannot_update_at_once(tmp_path: Path) -> None:
    with (
        named_engine(tmp_path, PREFACE, allow_callables=True) as (name, _),
        LLM.attach(name) as trainer,
        LLM.attach(name) as other,
    ):
        weights = weights_of(trainer)
        first, second = put_on_gpu(trainer), put_on_gpu(other)
        trainer.start_weight_update()
        trainer.update_weights(half_of(weights))
        for call in (other.start_weight_update, lambda: other.update_weights(weights)):
            with pytest.raises(CallOrderError, match="another front end"):
                call()
        lent = {"handle": "x", "num_bytes": 64}
        for method, argument in ((Method.LEND_MEMORY, lent), (Method.STAGE_LENT, [])):
            with pytest.raises(CallOrderError, match="start one first"):
                other._dispatcher.call(method, argument)
        assert second.log == []
        assert mappings(trainer) == 1
        trainer.finish_weight_update("first")
        assert first.log[-1] == "free"
        other.update_weights(weights, version="second")
        assert second.log[-1] == "free"
        assert trainer.get_weight_version() == "second"
        assert mappings(trainer) == 0
        other.start_weight_update()
        other.update_weights(half_of(weights))
        assert mappings(trainer) == 1
        other.close()
        assert second.log[-1] == "free"
        wait_until(lambda: mappings(trainer) == 0, "the mapping ends")
        trainer.update_weights(weights)
