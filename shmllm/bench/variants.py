"""Arms: what is compared, which package each needs, and which cases it takes part in.

Owns the table. A link's module is imported only when its arm runs, in its own processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shmllm.bench.cases import COPIED_UP_TO_BYTES, Case, Payload
from shmllm.bench.loads import Load, bytes_load, wire_load

REFERENCE_ARM = "zmq"


@dataclass(frozen=True)
class Variant:
    """One way to get a message across.

    Attributes:
        link: module and family of its `open_` and `attach_` functions.
        option: what they are given besides a directory.
        package: the import it needs; "" for none.
        is_ours: whether it carries the project's own encoding instead of msgpack.
        smallest: of its cases in bytes; 0 for all cases, also those of messages.
    """

    name: str
    transport: tuple[str, str]
    option: str = ""
    package: str = ""
    is_ours: bool = False
    smallest: int = 0

    def open(self, directory: str) -> tuple[Any, tuple[Any, ...]]:
        """The front end's link, and the handles that the core needs."""
        opened: tuple[Any, tuple[Any, ...]] = self._function("open")(self.option, directory)
        return opened

    def attach(self, handles: tuple[Any, ...]) -> Any:
        """The core's link."""
        return self._function("attach")(*handles)

    def load(self, case: Case) -> Load:
        """How a case's payload is encoded."""
        if self.is_ours:
            return wire_load(case)
        if case.payload is Payload.BYTES:
            return bytes_load(case)
        from shmllm.bench.msgpack_loads import msgpack_load

        return msgpack_load(case)

    def why_not(self, case: Case) -> str:
        """Why it leaves a case out; "" if it does not."""
        if self.smallest and (case.payload is not Payload.BYTES or case.size < self.smallest):
            return "for large payloads only"
        if case.payload is not Payload.BYTES and not self.is_ours and not is_installed("msgspec"):
            return "msgspec is not installed"
        return ""

    def _function(self, verb: str) -> Callable[..., Any]:
        module, family = self.transport
        function: Callable[..., Any] = getattr(
            import_module(f"shmllm.bench.{module}"), f"{verb}_{family}"
        )
        return function


VARIANTS = {
    variant.name: variant
    for variant in (
        *(
            Variant(f"shm-{policy}", ("shm_link", "shm"), policy, is_ours=True)
            for policy in ("latency", "balanced", "idle")
        ),
        Variant("zmq", ("zmq_link", "zmq"), package="zmq"),
        Variant(
            "zmq-nocopy",
            ("zmq_link", "zmq"),
            "nocopy",
            package="zmq",
            smallest=COPIED_UP_TO_BYTES,
        ),
        Variant("pipe", ("links", "pipe")),
        Variant("queue", ("links", "queue")),
        Variant("faster-fifo", ("links", "queue"), "faster-fifo", package="faster_fifo"),
        Variant("iceoryx2", ("iceoryx_link", "iceoryx"), package="iceoryx2"),
    )
}


def is_installed(package: str) -> bool:
    """Whether an import would find it."""
    return find_spec(package) is not None


def split_by_presence(names: Sequence[str]) -> tuple[list[Variant], list[str]]:
    """The arms that can run, and a line for each that cannot or not in all cases."""
    variants = [VARIANTS[name] for name in names]
    present = [
        variant for variant in variants if not variant.package or is_installed(variant.package)
    ]
    absent = [variant for variant in variants if variant not in present]
    lines = [f"{variant.name}: skipped, {variant.package} is not installed" for variant in absent]
    if not is_installed("msgspec"):
        lines += [
            f"{variant.name}: only plain bytes, msgspec is not installed"
            for variant in present
            if not (variant.is_ours or variant.smallest)
        ]
    return present, lines
