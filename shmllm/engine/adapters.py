"""The engine's low-rank adapters: which are known, and which of them are in memory.

Adapters are known by their number until they are removed. Those that were sent as tensors, and
those that are pinned, stay in memory. A bounded number of the others is there: the least recently
used one makes room, unless running requests use it, and is read again when a request needs it. This
module must not know what an adapter contains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shmllm.config.lora import LoraConfig
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.core.weak_calls import weak_call
from shmllm.errors import EngineStartError, RequestError
from shmllm.params.lora import LoRARequest

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Adapter:
    """A known adapter.

    Attributes:
        name: what people call it.
        path: its directory; empty: it was sent as tensors.
        loaded: the runner's form of it, with a `digest`; None: it is not in memory.
        is_pinned: whether it stays in memory.
    """

    name: str
    path: str
    loaded: Any = None
    is_pinned: bool = False

    @property
    def stays(self) -> bool:
        """Whether it makes no room for others."""
        return self.is_pinned or not self.path


class Adapters:
    """
    Args:
        config: the options.
        read: reads an adapter from a directory; raises EngineStartError.
        scheduler: knows which requests use which adapter.
    """

    def __init__(
        self, config: LoraConfig, read: Callable[[str], Any], scheduler: Scheduler
    ) -> None:
        self._config = config
        self._read = read
        self._scheduler = scheduler
        self._known: dict[int, Adapter] = {}  # the least recently used first
        self._held: dict[int, tuple[int, Adapter | None]] = {}  # by front end, what it changes
        scheduler.adapters.prepare = weak_call(self.prepare)

    @property
    def ids(self) -> list[int]:
        """The numbers of the known adapters, sorted."""
        return sorted(self._known)

    def add(self, lora: LoRARequest) -> bool:
        """Read an adapter, unless it is known.

        Returns:
            Whether it was read.

        Raises:
            RequestError: adapters are not enabled, the adapter cannot be read, or another one has
                its number.
        """
        self._check_enabled()
        known = self._known.get(lora.lora_int_id)
        if known is not None and not lora.load_inplace:
            self._check_same(known, lora)
            return False
        if not lora.lora_path:
            raise RequestError(f"the engine has no adapter {lora.lora_int_id} ({lora.lora_name})")
        self.put(lora, self._load(lora.lora_path))
        return True

    def add_made(self, lora: LoRARequest, make: Callable[[], Any]) -> None:
        """Make an adapter known that was sent as tensors.

        Args:
            lora: its number and name, and whether it may replace another one's contents.
            make: makes the runner's form of it; raises EngineStartError.

        Raises:
            RequestError: adapters are not enabled, the adapter does not suit the model, or the
                number is in use.
        """
        self._check_enabled()
        if lora.lora_int_id in self._known and not lora.load_inplace:
            raise RequestError(
                f"adapter {lora.lora_int_id} exists: pass load_inplace=True to replace it"
            )
        self.put(replace(lora, lora_path=""), _refusing(make))

    def put(self, lora: LoRARequest, loaded: Any) -> None:
        """Make an adapter known, or replace its contents, with which running requests continue.

        Args:
            lora: its number and name, and its directory if it has one.
            loaded: the runner's form of it.
        """
        number = lora.lora_int_id
        known = self._known.pop(number, None)
        adapter = Adapter(lora.lora_name, lora.lora_path)
        adapter.is_pinned = known is not None and known.is_pinned
        if adapter.stays or number in self._scheduler.adapters.used or self._make_room():
            adapter.loaded = loaded
        self._known[number] = adapter
        if known is not None:
            self._scheduler.replace_adapter(number, loaded)

    def remove(self, number: int) -> bool:
        """Forget an adapter. Returns whether it was known.

        Raises:
            RequestError: requests use it.
        """
        self._check_enabled()
        if number not in self._known:
            return False
        users = sum(request.lora_id == number for request in self._scheduler.requests())
        if users:
            raise RequestError(
                f"adapter {number} has {users} requests: abort them or let them end first"
            )
        del self._known[number]
        return True

    def pin(self, number: int) -> bool:
        """Keep an adapter in memory until it is removed. Returns True.

        Raises:
            RequestError: it is not known, or cannot be read again.
        """
        self._check_enabled()
        adapter = self._known.get(number)
        if adapter is None:
            raise RequestError(f"the engine has no adapter {number}")
        if adapter.loaded is None:
            adapter.loaded = self._load(adapter.path)
        adapter.is_pinned = True
        return True

    def hold(self, client: int, number: int) -> bool:
        """Remember an adapter for `release`, in place of the one that the front end held before.

        Args:
            client: the front end that asks.
            number: the adapter's; it need not be known.

        Returns:
            False, without any effect, if another front end holds the adapter.
        """
        if self._is_held_by_another(client, number):
            return False
        known = self._known.get(number)
        self._held[client] = number, None if known is None else replace(known)
        return True

    def holds(self, client: int) -> bool:
        """Whether a front end holds an adapter."""
        return client in self._held

    def check_free(self, client: int, number: int) -> None:
        """Raise RequestError if another front end than this one holds an adapter."""
        if self._is_held_by_another(client, number):
            raise RequestError(f"another front end is changing adapter {number}: try again")

    def _is_held_by_another(self, client: int, number: int) -> bool:
        return any(held == number and owner != client for owner, (held, _) in self._held.items())

    def release(self, client: int, restore: bool) -> None:
        """Forget what was held. Does nothing if the front end holds no adapter.

        Args:
            client: the front end.
            restore: undo what has changed the adapter since.

        Raises:
            RequestError: it is new and requests use it, or it cannot be read again.
        """
        if client not in self._held:
            return
        number, before = self._held.pop(client)
        if restore and before is None:
            self.remove(number)
        elif restore and before is not None:
            self._restore(number, before)

    def forget_client(self, client: int) -> None:
        """Restore the adapter that a disconnected front end held: it has not ended the change."""
        try:
            self.release(client, restore=True)
        except RequestError as problem:
            logger.warning("an adapter keeps what a front end changed before it ended: %s", problem)

    def _restore(self, number: int, before: Adapter) -> None:
        now = self._known.get(number)
        if now is None or (now.path, now.loaded) != (before.path, before.loaded):
            # Those that were sent as tensors are in memory.
            loaded = self._load(before.path) if before.loaded is None else before.loaded
            self.put(LoRARequest(before.name, number, before.path), loaded)
        self._known[number].name = before.name
        self._known[number].is_pinned = before.is_pinned

    def expect(self, lora: LoRARequest) -> None:
        """Make sure that a new request's adapter is known.

        Raises:
            RequestError: see `add`.
        """
        self.add(replace(lora, load_inplace=False))

    def prepare(self, request: Request) -> str | None:
        """Give a waiting request its adapter. Returns why that is not possible, or None."""
        adapter = self._known[request.lora_id]
        try:
            if adapter.loaded is None:
                loaded = self._load(adapter.path)
                has_room = self._make_room()
                assert has_room, "a step has fewer adapters than there is room for"
                adapter.loaded = loaded
        except RequestError as problem:
            return str(problem)
        self._known[request.lora_id] = self._known.pop(request.lora_id)
        request.take_adapter(adapter.loaded, adapter.loaded.digest)
        return None

    def _load(self, path: str) -> Any:
        return _refusing(lambda: self._read(path))

    def _make_room(self) -> bool:
        """Let the least recently used adapters make room for one more. Returns whether there is
        room."""
        used = self._scheduler.adapters.used
        in_memory = {
            number: each
            for number, each in self._known.items()
            if each.loaded is not None and not each.stays
        }
        num_left = len(in_memory)
        for number, adapter in in_memory.items():
            if num_left >= self._config.most_kept and number not in used:
                adapter.loaded = None
                num_left -= 1
        return num_left < self._config.most_kept

    def _check_enabled(self) -> None:
        if not self._config.enable_lora:
            raise RequestError("this engine has no adapters: start it with enable_lora=True")

    def _check_same(self, known: Adapter, lora: LoRARequest) -> None:
        """An adapter that was sent as tensors is known by its name, others by their directory."""
        is_same = known.path == lora.lora_path if known.path else known.name == lora.lora_name
        if lora.lora_path and not is_same:
            whence = known.path or "tensors"
            raise RequestError(
                f"adapter {lora.lora_int_id} is {known.name!r} from {whence}: remove it first, or "
                "pass load_inplace=True"
            )


def _refusing(make: Callable[[], Any]) -> Any:
    """Returns what `make` returns; its EngineStartError becomes a RequestError."""
    try:
        return make()
    except EngineStartError as problem:
        raise RequestError(str(problem)) from None
