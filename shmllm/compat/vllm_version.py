"""`vllm.version`: the version of vLLM that this package stands for."""

from __future__ import annotations

from shmllm.compat.vllm_modules import VERSION

__version__ = VERSION
__version_tuple__ = (*map(int, VERSION.partition("+")[0].split(".")), VERSION.partition("+")[2])
