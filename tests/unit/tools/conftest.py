"""tools/ is no package: its modules are found as `tools/gpu_check` finds them."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = str(Path(__file__).resolve().parents[3] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)
