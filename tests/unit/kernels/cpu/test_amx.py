"""Whether this process may use AMX: what the CPU has, and what Linux answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shmllm_kernels.cpu import amx, object_code
from shmllm_kernels.cpu.amx import HAS_AMX, lists_amx


def test_amx_is_found_in_cpuinfo_only_with_all_its_parts() -> None:
    complete = "processor\t: 0\nflags\t\t: fpu amx_bf16 sse2 amx_tile amx_int8 flush\n"
    assert lists_amx(complete.splitlines())
    assert not lists_amx(complete.replace("amx_int8", "avx").splitlines())
    assert not lists_amx(complete.replace("flags", "other").splitlines())
    assert not lists_amx([])


@pytest.mark.parametrize(("answer", "is_permitted"), [(0, True), (-1, False)])
def test_linux_decides(answer: int, is_permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def system_call(*arguments: object) -> int:
        return answer

    library = SimpleNamespace(syscall=system_call)
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda name: library)
    assert amx._is_permitted() == is_permitted


def test_code_is_for_amx_only_where_it_exists_and_is_cached_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = object_code.FEATURES.flatten().split(",")
    assert ("+amx-tile" in features) == HAS_AMX
    object_code._environment.cache_clear()
    environment = object_code._environment()
    monkeypatch.setitem(object_code.FEATURES, "amx-tile", not HAS_AMX)
    object_code._environment.cache_clear()
    try:
        assert object_code._environment() != environment
    finally:
        object_code._environment.cache_clear()
