"""The directory of temporary files of gpu_check."""

from __future__ import annotations

import pytest
from gpu.scratch import scratch


def test_it_is_removed_at_the_end_and_after_an_error(tmp_path):
    def work() -> None:
        with scratch(tmp_path) as directory:
            (directory / "part").mkdir()
            (directory / "part" / "output").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_command_has_left_is_removed(tmp_path):
    killed = scratch(tmp_path)
    (killed.__enter__() / "part").mkdir()
    (tmp_path / "gpu-check.json").touch()
    with scratch(tmp_path) as directory:
        assert not list(directory.iterdir())
        assert {path.name for path in tmp_path.iterdir()} == {"gpu-check.json", directory.name}


def test_parts_in_other_folders_find_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with scratch(tmp_path.relative_to(tmp_path)) as directory:
        assert directory.is_absolute()
