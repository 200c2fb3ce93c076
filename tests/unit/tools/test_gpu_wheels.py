"""Which wheels are downloaded for the GPU machine, and which are installed there."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest
from gpu import wheels


def test_all_requirements_are_downloaded_except_the_preinstalled_ones(monkeypatch, tmp_path):
    commands: list[list[str]] = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, check: commands.append(command))
    wheels.fetch(tmp_path)
    wheels.fetch(tmp_path, ["llvmlite"])
    names = {wheels.name_of(word) for word in commands[0] if word[0].isalpha()}
    assert {"posix-ipc", "llguidance", "cloudpickle", "click", "rich", "pytest-xdist"} <= names
    assert "nvidia-cuda-sanitizer-api" in names
    assert not names & {"torch", "triton", "transformers", "numpy", "llvmlite"}
    assert "--python-version=3.12" in commands[0]
    assert commands[1][-1].startswith("llvmlite>=")


def test_what_the_gpu_tests_import_is_installed_or_carried():
    """The third-party modules of the files that run there, by their packages."""
    packages = {
        "PIL": "pillow",
        "posix_ipc": "posix-ipc",
        "huggingface_hub": "huggingface-hub",
        "xdist": "pytest-xdist",
    }
    found = set()
    for folder in ("shmllm", "kernels", "tools/gpu", "tests/gpu", "tests/conformance"):
        for file in (wheels.ROOT / folder).rglob("*.py"):
            found |= imported(ast.parse(file.read_text()))
    theirs = found - sys.stdlib_module_names - OURS
    assert "torch" in theirs
    known = {packages.get(name, name.replace("_", "-")) for name in theirs}
    assert known <= {*wheels.requirements(), *wheels.PREINSTALLED, *OPTIONAL}


OURS = {"shmllm", "shmllm_kernels", "gpu", "support", "conformance"}
OPTIONAL = {
    "av",
    "cuda",  # without cuda-bindings, which torch brings, engines cannot sleep
    "prometheus-client",  # a metrics server
    "ray",  # batch files on a cluster
    "trl",  # a trainer
    "vllm",  # the comparison with it
    "pyarrow",  # Parquet files
}


def imported(tree: ast.Module) -> set[str]:
    """Returns the top-level modules that a file imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_wheels_that_cannot_be_carried_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "small-1.0-py3-none-any.whl").write_bytes(b"1")
    (tmp_path / "large-1.0-py3-none-any.whl").write_bytes(b"1" * 99)
    assert wheels.total_bytes(tmp_path) == 100
    monkeypatch.setattr(wheels, "MOST_BYTES", 99)
    with pytest.raises(ValueError, match=r"the largest is large-1\.0"):
        wheels.total_bytes(tmp_path)


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
