"""Which wheels travel to a machine without a network, and which of them are installed there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from gpu import wheels


def test_what_is_required_travels_but_what_belongs_to_the_driver():
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
    """As small as pip takes it."""
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


def test_only_what_is_missing_is_installed(tmp_path):
    site = tmp_path / "site"
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "gpu_check_probe")
    make_wheel(tmp_path / "wheels", "numpy")
    assert wheels.install(tmp_path / "wheels", site) == ["gpu-check-probe"]
    assert (site / "gpu_check_probe.py").exists()
    assert not (site / "numpy.py").exists()


def test_nothing_to_install_is_fine(tmp_path):
    assert wheels.install(tmp_path, tmp_path / "site") == []


def test_a_name_that_is_no_requirement_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no requirement 'nosuch'; there are .*posix-ipc"):
        wheels.fetch(tmp_path, ["posix_ipc", "nosuch"])
