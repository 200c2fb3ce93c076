"""The option for how a trainer's new weights reach an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmllm.config.options import Section, option
from shmllm.errors import EngineStartError

BACKENDS = {
    "shm": "shmllm.transfer.shm",
    "ipc": "shmllm.transfer.ipc",
    "nccl": "shmllm.transfer.broadcast",
    "gloo": "shmllm.transfer.broadcast",
}
"""The module of each backend. It defines `Receiver`, the engine's end (`transfer.receiver`), and
`Sender`, the trainer's end (`transfer.sender`)."""

DEFAULT_BACKEND = "shm"


@dataclass(frozen=True)
class BackendName:
    """The kind of the option `weight_transfer_config`: a mapping {"backend": name}, the same as
    JSON text, an object with the attribute `backend`, or the name alone. The value is the name."""

    def parse(self, name: str, value: Any) -> Any:
        backend = _backend_in(name, value)
        if not isinstance(backend, str) or backend not in BACKENDS:
            raise EngineStartError(
                f"{name}: the backend {backend!r} is not one of {', '.join(BACKENDS)}"
            )
        return backend


def _backend_in(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as problem:
            raise EngineStartError(f"{name} is not valid JSON: {problem}") from None
    if isinstance(value, Mapping):
        if unknown := [key for key in value if key != "backend"]:
            raise EngineStartError(f"{name} takes the key 'backend' only, got {unknown[0]!r}")
        return value.get("backend", DEFAULT_BACKEND)
    return value if isinstance(value, str) else getattr(value, "backend", value)


@dataclass(frozen=True, slots=True)
class WeightTransferConfig(Section):
    """How a trainer's new weights reach an engine."""

    backend: str = option(
        DEFAULT_BACKEND,
        'How a trainer sends weights, as {"backend": name}: "shm" (shared memory), "ipc" (CUDA IPC '
        'handles), "nccl" or "gloo" (a broadcast over a network, which opens sockets).',
        BackendName(),
        name="weight_transfer_config",
    )
