"""The table of variants that `shmllm bench ipc` compares.

A variant is a transport with an encoding. The table says which package each variant needs and which
cases it runs. A transport's module is imported only in the processes of its own variant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shmllm.bench.cases import COPIED_UP_TO_BYTES, Case, Payload
from shmllm.bench.loads import Load, bytes_load, wire_load

REFERENCE_VARIANT = "zmq"


@dataclass(frozen=True)
class Variant:
    """One transport with an encoding.

    Attributes:
        name: its name on the command line and in the results.
        transport: (module, suffix) of its functions `open_SUFFIX` and `attach_SUFFIX`.
        option: the first argument of `open_SUFFIX`.
        package: the package that it imports; "" for none.
        is_ours: whether it uses shmllm's own encoding instead of msgpack.
        min_bytes: it runs only cases of plain bytes from this size on; 0: it runs all cases.
    """

    name: str
    transport: tuple[str, str]
    option: str = ""
    package: str = ""
    is_ours: bool = False
    min_bytes: int = 0

    def open(self, directory: str) -> tuple[Any, tuple[Any, ...]]:
        """Opens the front end's transport; also returns the handles for the core."""
        opened: tuple[Any, tuple[Any, ...]] = self._function("open")(self.option, directory)
        return opened

    def attach(self, handles: tuple[Any, ...]) -> Any:
        """Opens the core's transport."""
        return self._function("attach")(*handles)

    def load(self, case: Case) -> Load:
        """The functions that encode and decode the payload of `case`."""
        if self.is_ours:
            return wire_load(case)
        if case.payload is Payload.BYTES:
            return bytes_load(case)
        from shmllm.bench.msgpack_loads import msgpack_load

        return msgpack_load(case)

    def skip_reason(self, case: Case) -> str:
        """The reason why this variant does not run `case`; "" if it does."""
        if self.min_bytes and (case.payload is not Payload.BYTES or case.size < self.min_bytes):
            return "for large payloads only"
        if case.payload is not Payload.BYTES and not self.is_ours and not is_installed("msgspec"):
            return "msgspec is not installed"
        return ""

    def _function(self, verb: str) -> Callable[..., Any]:
        module, suffix = self.transport
        function: Callable[..., Any] = getattr(
            import_module(f"shmllm.bench.{module}"), f"{verb}_{suffix}"
        )
        return function


VARIANTS = {
    variant.name: variant
    for variant in (
        *(
            Variant(f"shm-{policy}", ("shm_transport", "shm"), policy, is_ours=True)
            for policy in ("latency", "balanced", "idle")
        ),
        Variant("zmq", ("zmq_transport", "zmq"), package="zmq"),
        Variant(
            "zmq-nocopy",
            ("zmq_transport", "zmq"),
            "nocopy",
            package="zmq",
            min_bytes=COPIED_UP_TO_BYTES,
        ),
        Variant("pipe", ("transports", "pipe")),
        Variant("queue", ("transports", "queue")),
        Variant("faster-fifo", ("transports", "queue"), "faster-fifo", package="faster_fifo"),
        Variant("iceoryx2", ("iceoryx_transport", "iceoryx"), package="iceoryx2"),
    )
}


def is_installed(package: str) -> bool:
    """Whether `package` can be imported."""
    return find_spec(package) is not None


def split_by_availability(names: Sequence[str]) -> tuple[list[Variant], list[str]]:
    """Splits variants by whether their packages are installed.

    Returns:
        The variants that can run, and one line of text for each variant that cannot run at all or
        not in all cases.
    """
    variants = [VARIANTS[name] for name in names]
    available = [
        variant for variant in variants if not variant.package or is_installed(variant.package)
    ]
    missing = [variant for variant in variants if variant not in available]
    lines = [f"{variant.name}: skipped, {variant.package} is not installed" for variant in missing]
    if not is_installed("msgspec"):
        lines += [
            f"{variant.name}: only plain bytes, msgspec is not installed"
            for variant in available
            if not (variant.is_ours or variant.min_bytes)
        ]
    return available, lines
