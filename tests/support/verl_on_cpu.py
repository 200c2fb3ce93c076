"""A platform of verl for computers without an accelerator, of which verl has none.

verl imports the module that VERL_USE_EXTERNAL_MODULES names, in the front end and in engines, and
chooses the platform that VERL_PLATFORM names. This one has what is asked of a device when weights
move.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"


def _do_nothing() -> None: ...


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """A device whose work is done when a call returns."""

    device_name: Any = NAME
    vendor_name: Any = NAME
    device_module: Any = SimpleNamespace(
        synchronize=_do_nothing, empty_cache=_do_nothing, current_device=lambda: 0
    )

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False

    def ray_resource_name(self) -> str:
        return "CPU"
