"""Clients of vLLM, unmodified, on shmllm. Each is skipped where it is not installed.

pip install '.[test,clients]' && tools/test -m clients
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmllm.compat import vllm as shim


@pytest.fixture
def vllm_is_shmllm() -> Iterator[None]:
    """`import vllm` finds shmllm within the test."""
    shim.install()
    yield
    shim.uninstall()
