"""The optional packages of shmllm, and the command that installs them.

Extras can be installed by name only from a package index that has shmllm. This module reads what
the installed distribution says about itself, so its commands work for a checkout, too.
"""

from __future__ import annotations

import re
import shlex


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, which setup.cfg declares.

    Args:
        extra: its name, such as "metrics".
    """
    packages = packages_of(extra)
    if not packages:  # shmllm runs from a source tree without being installed
        return f"pip install '.[{extra}]' in the source tree"
    return shlex.join(["pip", "install", *packages])


def packages_of(extra: str) -> list[str]:
    """The requirements of an extra, such as "prometheus-client>=0.20"; [] if they are unknown."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("shmllm") or []
    except PackageNotFoundError:
        return []
    is_wanted = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    parts = [line.partition(";") for line in lines]
    return [needed.strip() for needed, _, marker in parts if is_wanted.search(marker)]
