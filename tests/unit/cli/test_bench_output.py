"""The files of `shmllm bench`, which are checked before anything is measured."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shmllm.cli.bench import bench


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_folder_that_is_missing_is_found_before_the_measurement(option: str) -> None:
    done = CliRunner().invoke(bench, ["ipc", option, "/no/such/folder/x.svg"])
    assert done.exit_code == 2
    assert "/no/such/folder is no directory that can be written" in done.output
