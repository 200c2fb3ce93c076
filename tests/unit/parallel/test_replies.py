"""Results and errors arrive in rank 0 as what they were, or as text."""

from __future__ import annotations

import pytest

from shmllm import errors
from shmllm.parallel.replies import Failure, pack_failure, pack_result, unpack


def received(problem: Exception) -> Failure:
    """An error, as rank 0 receives it."""
    try:
        raise problem
    except Exception as raised:
        value, failure = unpack(pack_failure(raised))
    assert value is None
    assert failure is not None
    return failure


@pytest.mark.parametrize("value", [None, 0, (1, [2.5]), b"\0"])
def test_a_result_arrives_as_it_was(value: object) -> None:
    assert unpack(pack_result(value)) == (value, None)


@pytest.mark.parametrize(
    "kind", [errors.RequestError, errors.EngineStartError, errors.IpcTimeoutError]
)
def test_an_error_of_shmllm_keeps_its_class(kind: type[Exception]) -> None:
    found = received(kind("no room")).error_of(3)
    assert type(found) is kind
    assert str(found) == "rank 3: no room"


class TwoArgumentsError(Exception):
    """An exception that a pickle cannot make again."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


class WordlessError(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (TwoArgumentsError("code", 7), "TwoArgumentsError: code 7"),
        (WordlessError(), "WordlessError: <exception str() failed>"),
    ],
)
def test_another_error_arrives_as_text_with_the_traceback(problem: Exception, text: str) -> None:
    failure = received(problem)
    assert failure.trace.startswith("Traceback ")
    assert "in received" in failure.trace
    found = failure.error_of(3)
    assert type(found) is RuntimeError
    assert str(found) == f"rank 3: {text}\n{failure.trace}"


def test_a_name_of_the_module_that_is_no_error_is_text() -> None:
    assert type(Failure("nearest", "x", "trace").error_of(1)) is RuntimeError
    assert type(Failure("annotations", "x", "trace").error_of(1)) is RuntimeError
