"""Adds tools/, which is not a package, to the import path, as for `tools/gpu_check`."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = str(Path(__file__).resolve().parents[3] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)
