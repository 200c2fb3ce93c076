"""A front end that sends requests with any items."""

from __future__ import annotations

import time
from collections.abc import Sequence

from support.raw_front_end import RawFrontEnd
from support.waiting import PATIENCE_S

from shmllm.ipc.tensors import TensorWriter
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire import codec
from shmllm.wire.messages import PromptItem, RecordKind, Rejected

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
REFUSED, SERVED = "rejected", "served"


class Hostile(RawFrontEnd):
    """Sends requests with any items."""

    number = 0

    def send_item(self, item: Item, number: int, forgotten: Sequence[bytes] = ()) -> None:
        ref = b""
        if item.data is not None:
            slots, deadline = TensorWriter(self.channel.slots), time.monotonic() + PATIENCE_S
            alive = self.client.check_alive
            ref = slots.put(item.data, deadline=deadline, on_full=alive).encode()
        message = PromptItem(number, item, ref, list(forgotten))
        self.write(RecordKind.PROMPT_ITEM, b"".join(codec.encode_prompt_item(message)))

    def ask(self, items: Sequence[Item], token_ids: Sequence[int]) -> str:
        """Send a request, and wait for its end. Returns REFUSED or SERVED.

        Raises:
            EngineDeadError: the engine has ended the connection.
        """
        self.number += 1
        for item in items:
            self.send_item(item, self.number)
        message = EngineCoreRequest(self.number, token_ids, GREEDY, "hostile")
        self.write(RecordKind.ADD, b"".join(codec.encode_add(message)))
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            events = [*self.client.poll(0.01)]
            self.client._inbox.clear()
            for event in events:
                if isinstance(event, Rejected):
                    return REFUSED
                if any(getattr(event, "finishes", ())):
                    return SERVED
        raise AssertionError("the request never ends")
