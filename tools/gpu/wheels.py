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
PREINSTALLED = frozenset(
    {
        *("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors"),
        *("huggingface-hub", "jinja2", "llvmlite", "gguf", "prompt-toolkit"),
    }
)
"""Requirements that are not downloaded unless they are named: torch and transformers bring most of
them, and their versions depend on each other and on the driver. llvmlite, which only the tests
need, for the CPU's engine, is too large beside the others. The last two, for GGUF files and chats,
are imported by no test there."""
CARRIED = (
    *("markdown-it-py", "mdurl", "pygments"),  # of rich
    "cffi",  # of soundfile, without which transformers imports no model
    *("pytest", "iniconfig", "pluggy", "packaging", "pytest-xdist", "execnet"),
    "nvidia-cuda-sanitizer-api>=13.0,<13.1",  # of CUDA 13.0, as torch
)
"""What the tests and the part `first` need, and dependencies: pip downloads none by itself."""
MOST_BYTES = 48 * 2**20
"""A working tree with the wheels has to fit into 64 MiB."""
PYTHON = "3.12"
PLATFORMS = (
    # pip accepts only the platforms that are listed, so this lists all.
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def requirements() -> dict[str, str]:
    """Returns the requirements in setup.cfg and `CARRIED`, by the normalised names of packages."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].split("\n")
    required = [line for line in map(str.strip, lines) if line]
    return {name_of(line): line for line in [*required, *CARRIED]}


def name_of(requirement: str) -> str:
    """Returns the normalised name of a requirement's package."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def fetch(directory: Path, names: Iterable[str] = ()) -> int:
    """Downloads a wheel of each requirement that is not preinstalled, or of those with these names,
    for the GPU machine. Returns the bytes of all wheels in the directory.

    Raises:
        ValueError: a name is not the name of a requirement, or the wheels are too large.
        subprocess.CalledProcessError: pip found no wheel; its output says why.
    """
    known = requirements()
    wanted = [name_of(name) for name in names] or [n for n in known if n not in PREINSTALLED]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no requirement {unknown[0]!r}; the requirements are {', '.join(known)}")
    chosen = [known[name] for name in wanted]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    target = [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *target, "-d", str(directory), *chosen], check=True)
    return total_bytes(directory)


def total_bytes(directory: Path) -> int:
    """Returns the bytes of all wheels in a directory. Raises ValueError if they are too many."""
    sizes = {wheel.name: wheel.stat().st_size for wheel in directory.glob("*.whl")}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"the wheels have {total / 2**20:.1f} MiB, and {MOST_BYTES / 2**20:.0f} can be "
            f"carried; the largest is {largest}"
        )
    return total


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
