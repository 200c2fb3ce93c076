"""Calls of an LLM that tests interrupt, and what has to hold after each interrupt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.waiting import PATIENCE_S, holds_within

import shmllm
from shmllm import LLM, RequestOutputKind, SamplingParams

MODULES = (
    "shmllm/frontend/",
    "shmllm/client/",
    "shmllm/ipc/",
    "shmllm/wire/",
    "/threading.py",
    "/weakref.py",
)
WEIGHT = "model.norm.weight"
FEW = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def _read_weight() -> NDArray[np.float32]:
    """A weight of the bundled model, which is a file in bfloat16."""
    path = Path(shmllm.__file__).parent / "assets" / "tiny" / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:begin])[WEIGHT]["data_offsets"]
    halves = np.frombuffer(data[begin + first : begin + last], np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _double(worker: Any, array: Any) -> Any:
    """Runs in the engine."""
    return array + array


class InterruptedLLM:
    """The calls of one LLM, and its state between them.

    Args:
        llm: an LLM without requests, whose engine runs the bundled model.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._weight = _read_weight()
        self._array = np.arange(64.0)
        self._reference = self._tokens()
        self.calls: dict[str, Callable[[], Any]] = {
            "generate": self._tokens,
            "stream": self._stream,
            "collective_rpc": self._call,
            "update_weights": self._update,
            "enqueue": self._enqueue,
        }

    def check(self) -> None:
        """Raise AssertionError unless the next call works and nothing is left of earlier ones."""
        llm = self.llm
        if llm._enqueued._group.num_open:
            llm.wait_for_completion(use_tqdm=False)
        assert self._tokens() == self._reference
        dispatcher, client = llm._dispatcher, llm._client
        assert not dispatcher._lock.locked()
        assert dispatcher._poller is None
        assert (dispatcher._senders, dispatcher._groups) == ([], {})
        assert not dispatcher._discarded
        assert not dispatcher.outputs._states  # type: ignore[attr-defined]
        assert (client._replies, client._letters, client._inbox) == ({}, [], [])  # type: ignore[attr-defined]
        channel = client._channel  # type: ignore[attr-defined]
        slots, outputs = channel.slots, channel.output_slots
        assert holds_within(lambda: self._is_idle(), PATIENCE_S), llm.get_metrics()
        assert holds_within(lambda: slots.num_free == slots.num_slots, PATIENCE_S)
        assert not any(map(outputs._is_published, range(outputs.num_slots)))
        assert not slots._claimed
        assert not llm._weight_push.is_open
        channel.requests.check_integrity()
        channel.outputs.check_integrity()

    def _is_idle(self) -> bool:
        metrics = self.llm.get_metrics()
        return not metrics["running"] and not metrics["waiting"]

    def _tokens(self) -> list[list[int]]:
        outputs = self.llm.generate(["abc", "def f"], FEW, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _stream(self) -> None:
        texts = {0: "", 1: ""}
        params = SamplingParams(max_tokens=3, temperature=0, stop=["\n\n\n"])
        for output in self.llm.stream(["abc", "x"], params, output_kind=RequestOutputKind.DELTA):
            texts[output.prompt_index] += output.outputs[0].text

    def _call(self) -> None:
        (result,) = self.llm.collective_rpc(_double, args=(self._array,))
        assert result[-1] == 126.0

    def _update(self) -> None:
        self.llm.update_weights({WEIGHT: self._weight})

    def _enqueue(self) -> None:
        llm = self.llm
        before = len(llm._enqueued._states)
        try:
            llm.enqueue(["abc", "def f"], FEW, use_tqdm=False)
        finally:
            assert len(llm._enqueued._states) in (before, before + 2)
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs[-2:]] == self._reference
