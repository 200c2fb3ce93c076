"""What tests of clients share."""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path

import pytest


def needs(*packages: str, how: str = "pip install '.[clients]'") -> pytest.MarkDecorator:
    """Skips a module's tests, and says which package they need and how to install it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"needs {', '.join(missing)}: {how}"
    return pytest.mark.skipif(bool(missing), reason=reason)


def ray_environment(directory: Path) -> dict[str, str]:
    """For a Ray that puts no token into the home directory, reports no usage, and gives its actors
    as much of a busy machine as other programs have."""
    token = directory / "token"
    token.write_text(secrets.token_hex(16))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
