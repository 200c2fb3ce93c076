"""The checks of the part `first`, with kernels and devices that are wrong."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from gpu import first_part
from gpu.attention_case import AttentionCase
from gpu.settings import REHEARSAL

from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.gpu.plain_arena import PlainArena
from shmllm_kernels.reference.attention import paged_attention

CPU = torch.device("cpu")


def by_reference(case: AttentionCase, number: int = 0) -> torch.Tensor:
    """Returns attention computed in float64 from the case's block tables."""
    caches = (case._keys.double(), case._values.double())
    table, scale = case._tables[number], case.sizes.head_dim**-0.5
    query = case._query.double()
    return paged_attention(query, *caches, table, case._starts, case._contexts, scale).float()


@pytest.mark.parametrize("number", [0, 1])
def test_torchs_attention_is_computed_for_the_same_tokens(number):
    torch.manual_seed(0)
    for case in first_part.tile_cases(REHEARSAL):
        wanted = case.expected(number)
        assert wanted.shape == case.out.shape
        torch.testing.assert_close(wanted, by_reference(case, number), atol=1e-5, rtol=1e-5)


def errors(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> dict[str, float]:
    """Checks attention that a launch computes correctly and `spoil` then changes."""

    def launches(case: AttentionCase, config: Any, splits: int) -> list[Any]:
        def launch() -> None:
            case.out.copy_(by_reference(case))
            spoil(case.out)

        return [launch]

    monkeypatch.setattr(AttentionCase, "launches", launches)
    return first_part.check_tiles(REHEARSAL)["errors"]


def test_right_results_pass(monkeypatch):
    assert max(errors(monkeypatch, lambda out: None).values()) < 1e-4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out[-1, -1, -1].fill_(math.nan),
        lambda out: out[-1, -1].mul_(1.2),
        lambda out: out.copy_(out.roll(1, dims=1)),
    ],
    ids=["not a number", "a wrong head", "heads in another order"],
)
def test_wrong_results_fail(monkeypatch, spoil):
    with pytest.raises(AssertionError, match="attention is wrong by"):
        errors(monkeypatch, spoil)


class Device:
    """A device whose graphs compute nothing."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def make_arena(self, num_bytes: int, purpose: str) -> Any:
        return self._arena

    def capturing(self) -> Any:
        return contextlib.nullcontext()

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        return self

    def replay(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_a_graph_that_does_not_compute_on_the_new_memory_fails():
    arena = HostArena(first_part.ARENA_BYTES, "a test")
    with pytest.raises(AssertionError, match=r"a replay gave 0\.0 to 0\.0, not 6\.0"):
        first_part.remap_arena(Device(arena))


def test_memory_that_cannot_be_mapped_fails():
    arena = PlainArena(2**23, "a test", CPU, "the driver is too old")
    with pytest.raises(AssertionError, match="could not sleep: the driver is too old"):
        first_part.remap_arena(Device(arena))
