"""`vllm.platforms`: the device that an engine on this machine would use."""

from __future__ import annotations

from typing import Any

from shmllm.compat.vllm_modules import describe_absent


class Platform:
    """A CUDA device if torch finds one, else the CPU. Torch is imported when it is first asked."""

    simple_compile_backend = "eager"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu"."""
        return "cuda" if self.is_cuda() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        import torch

        return bool(torch.cuda.is_available()) and torch.version.hip is None

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_tpu = is_out_of_tree = is_unspecified = is_rocm

    def device_count(self) -> int:
        """The number of CUDA devices."""
        import torch

        return torch.cuda.device_count() if self.is_cuda() else 0

    def get_device_name(self, device_id: int = 0) -> str:
        """The name of a CUDA device, or "cpu"."""
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int] | None:
        """(major, minor) of the compute capability; None on a CPU."""
        import torch

        return torch.cuda.get_device_capability(device_id) if self.is_cuda() else None

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the compute capability is at least this one; 90 and (9, 0) mean the same."""
        own = self.get_device_capability(device_id)
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return own is not None and own >= wanted

    def is_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the compute capability is this one."""
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return self.get_device_capability(device_id) == wanted

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(describe_absent(f"vllm.platforms.current_platform.{name}"))


current_platform = Platform()
