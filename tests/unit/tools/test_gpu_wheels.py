"""Which wheels are downloaded for the GPU machine, and which are installed there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from gpu import wheels


def test_all_requirements_are_downloaded_except_the_preinstalled_ones():
    names = {wheels.name_of(each) for each in wheels.requirements()}
    assert {"posix-ipc", "llguidance", "llvmlite", "cloudpickle", "pytest"} <= names
    assert not names & {"torch", "triton", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("posix-ipc>=1.1", "posix-ipc"), ("ray[data]>=2", "ray"), ("Posix_IPC", "posix-ipc")],
)
def test_names_of_requirements(requirement, name):
    assert wheels.name_of(requirement) == name


def make_wheel(directory: Path, name: str) -> None:
    """Writes the smallest wheel that pip accepts."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "here = True\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)


def test_only_missing_packages_are_installed(tmp_path):
    site = tmp_path / "site"
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "gpu_check_probe")
    make_wheel(tmp_path / "wheels", "numpy")
    assert wheels.install(tmp_path / "wheels", site) == ["gpu-check-probe"]
    assert (site / "gpu_check_probe.py").exists()
    assert not (site / "numpy.py").exists()


def test_an_empty_directory_installs_nothing(tmp_path):
    assert wheels.install(tmp_path, tmp_path / "site") == []


def test_an_unknown_name_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"no requirement 'nosuch'; the requirements are .*posix-ipc"
    ):
        wheels.fetch(tmp_path, ["posix_ipc", "nosuch"])
