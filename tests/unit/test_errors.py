"""The exception tree, and what the errors show."""

from __future__ import annotations

import inspect
import pickle

import pytest

from shmllm import errors

TREE = {
    "RequestError": ("ShmLLMError", "ValueError"),
    "EnginePausedError": ("RequestError",),
    "CallOrderError": ("RequestError", "RuntimeError"),
    "EngineStartError": ("ShmLLMError",),
    "RankDeadError": ("ShmLLMError",),
    "QuantizeError": ("ShmLLMError",),
    "EngineDeadError": ("ShmLLMError",),
    "CallError": ("ShmLLMError",),
    "IpcError": ("ShmLLMError",),
    "SegmentError": ("IpcError",),
    "NoSpaceError": ("IpcError",),
    "ProtocolMismatchError": ("IpcError",),
    "MessageTooLargeError": ("IpcError",),
    "DeviceMemoryError": ("IpcError",),
    "IpcTimeoutError": ("IpcError", "TimeoutError"),
}


def test_the_tree_is_the_one_that_is_documented():
    classes = {
        name: tuple(base.__name__ for base in member.__bases__)
        for name, member in vars(errors).items()
        if inspect.isclass(member)
    }
    assert classes == TREE | {"ShmLLMError": ("Exception",)}


def test_the_drawing_names_every_class():
    assert [name for name in TREE if name not in errors.__doc__] == []


WITH_TRACEBACK = [errors.EngineStartError, errors.EngineDeadError, errors.CallError]


@pytest.mark.parametrize("kind", WITH_TRACEBACK)
def test_the_engines_traceback_follows_the_message(kind):
    assert str(kind("it died", remote_traceback="Traceback: x")) == "it died\nTraceback: x"


@pytest.mark.parametrize("kind", WITH_TRACEBACK)
def test_without_a_traceback_there_is_the_message_alone(kind):
    assert str(kind("it died")) == "it died"


def test_a_death_carries_how_it_came():
    death = errors.EngineDeadError("x", exit_code=3, signal=9, remote_traceback="t")
    assert (death.exit_code, death.signal, death.remote_traceback) == (3, 9, "t")


def test_a_death_survives_the_way_to_another_process():
    death = pickle.loads(pickle.dumps(errors.EngineDeadError("x", exit_code=3, signal=9)))
    assert (str(death), death.exit_code, death.signal) == ("x", 3, 9)


def test_a_failed_start_survives_the_way_to_another_process():
    failure = pickle.loads(pickle.dumps(errors.EngineStartError("x", "trace")))
    assert str(failure) == "x\ntrace"


def test_the_nearest_name_of_a_long_one_is_found_at_once() -> None:
    """difflib would compare all characters, for minutes."""
    assert errors.nearest("tempratur" + "e" * 20_000_000, ["top_p", "temperature"]) == "temperature"
    assert errors.nearest("x", []) is None
