"""What the machine with the GPU may lack, as wheels: fetched where there is a network, installed
beside the packages that are there where there is none. Imports only the standard library.
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
THERE = frozenset({"torch", "triton", "transformers", "numpy", "tokenizers", "safetensors"})
"""Required, and not fetched: large, and tied to the machine's driver and to each other."""
ALSO = ("pytest", "iniconfig", "pluggy", "packaging", "pygments", "hypothesis", "sortedcontainers")
"""What the tests need, and what that needs."""
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),  # pip takes no newest one
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def requirements() -> list[str]:
    """Of setup.cfg, less what is there; and what the tests need."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].split("\n")
    return [line for line in map(str.strip, lines) if line and name_of(line) not in THERE] + [*ALSO]


def name_of(requirement: str) -> str:
    """The package's name as indexes write it."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def fetch(directory: Path, names: Iterable[str] = ()) -> None:
    """Download a wheel of each requirement, or of those with these names, for the machine.

    Raises:
        ValueError: a name is none of them.
        subprocess.CalledProcessError: pip found no such wheel; it said why.
    """
    known = {name_of(each): each for each in requirements()}
    wanted = [name_of(name) for name in names] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no requirement {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in wanted]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    target = [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *target, "-d", str(directory), *chosen], check=True)


def install(directory: Path, target: Path) -> list[str]:
    """Install those wheels of a directory whose packages are not there. Returns their names."""
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
