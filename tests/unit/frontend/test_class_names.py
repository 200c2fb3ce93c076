"""The names of classes that options hold."""

from __future__ import annotations

import sys

import pytest

from shmllm.frontend.options.engine_options import make_engine_config


class Extension:
    """A class of the program itself, as the test pretends."""


@pytest.mark.parametrize(("ranks", "begins"), [(1, "__main__:"), (2, "pickle:")])
def test_only_a_single_process_imports_from_the_program_itself(
    ranks: int, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Extension, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Extension", Extension, raising=False)
    config = make_engine_config(
        multiprocess=False, tensor_parallel_size=ranks, worker_extension_cls=Extension
    )
    assert config.plugins.worker_extension_cls.startswith(begins)
