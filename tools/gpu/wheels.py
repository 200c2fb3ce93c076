"""Downloads wheels on a machine with a network, and installs those that the GPU machine lacks.

This module imports only the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREINSTALLED = frozenset({"torch", "triton", "transformers", "numpy", "tokenizers", "safetensors"})
"""Requirements that are not downloaded: they are large and depend on the machine's driver and on
each other's versions."""
TEST_REQUIREMENTS = (
    "pytest",
    "iniconfig",
    "pluggy",
    "packaging",
    "pygments",
    "hypothesis",
    "sortedcontainers",
)
"""The packages that the tests need, with their dependencies."""
PYTHON = "3.12"
PLATFORMS = (
    # pip accepts only the platforms that are listed, so this lists all.
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def requirements() -> list[str]:
    """Returns the requirements in setup.cfg without the preinstalled ones, and those of the
    tests."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].split("\n")
    required = [line for line in map(str.strip, lines) if line]
    return [line for line in required if name_of(line) not in PREINSTALLED] + [*TEST_REQUIREMENTS]


def name_of(requirement: str) -> str:
    """Returns the normalised name of a requirement's package."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def fetch(directory: Path, names: Iterable[str] = ()) -> None:
    """Downloads a wheel of each requirement, or of those with these names, for the GPU machine.

    Raises:
        ValueError: a name is not the name of a requirement.
        subprocess.CalledProcessError: pip found no wheel; its output says why.
    """
    known = {name_of(each): each for each in requirements()}
    wanted = [name_of(name) for name in names] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no requirement {unknown[0]!r}; the requirements are {', '.join(known)}")
    chosen = [known[name] for name in wanted]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    target = [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *target, "-d", str(directory), *chosen], check=True)


def install(directory: Path, target: Path) -> list[str]:
    """Installs the wheels of a directory whose packages are missing. Returns their names."""
    missing = {}
    for wheel in sorted(directory.glob("*.whl")):
        name = name_of(wheel.name.partition("-")[0])
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing[name] = str(wheel)
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(target), *missing.values()]
        subprocess.run(command, check=True)
    return list(missing)
