"""Fixtures for programs written for vLLM that run on shmllm. A program that is not installed is
skipped.

pip install '.[test,clients]' && tools/test -m clients
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.grpo_runs import environment_kept, make_policy

from shmllm.compat import trl
from shmllm.compat import vllm as shim


@pytest.fixture
def vllm_is_shmllm() -> Iterator[None]:
    """`import vllm` finds shmllm within the test."""
    shim.install()
    yield
    shim.uninstall()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small model to be trained."""
    path = tmp_path_factory.mktemp("policy")
    make_policy(path)
    return path


@pytest.fixture
def kept_environment() -> Iterator[None]:
    """What trainers set in this process is as before after the test."""
    with environment_kept():
        yield


@pytest.fixture
def trl_uses_shmllm(kept_environment: None) -> Iterator[None]:
    """TRL's colocate mode runs on shmllm within the test."""
    trl.install()
    yield
    trl.uninstall()
