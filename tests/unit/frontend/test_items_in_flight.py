"""The bytes of images in flight, and a stream that waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmllm.frontend import items_in_flight
from shmllm.frontend.items_in_flight import ItemsInFlight
from shmllm.params.items import Item
from shmllm.params.sampling import SamplingParams


def item(number: int, num_bytes: int = 3) -> Item:
    pixels = np.zeros((1, 1, num_bytes // 3, 3), np.uint8)
    return Item(bytes([number]) * 32, ((0, 1),), (1, 1, 1), pixels)


def test_an_image_counts_once_as_long_as_a_request_has_it() -> None:
    pixels = ItemsInFlight()
    pixels.add(0, (item(1, 30), item(2, 60)))
    pixels.add(1, (item(2, 60), item(2, 60)))
    pixels.add(2, ())
    assert pixels.num_bytes == 90
    pixels.remove(0)
    assert pixels.num_bytes == 60
    for index in (1, 2, 3):
        pixels.remove(index)
    assert pixels.num_bytes == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_a_stream_reads_no_further_prompts_while_it_is_full(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    llm, engine = make_llm()
    prepare = llm.front_end.inputs.prepare

    def with_items(prompts: Any, *others: Any) -> Any:
        requests = prepare(prompts, *others)
        for prompt, request in zip(prompts, requests, strict=True):
            request.submitted.items = (item(prompt[1], 30),)
        return requests

    def alone(prompts: Any, *others: Any) -> Any:
        return [one for prompt in prompts for one in with_items([prompt], *others)]

    monkeypatch.setattr(llm.front_end.inputs, "prepare", alone)
    monkeypatch.setattr(items_in_flight, "MOST_BYTES", 90)
    monkeypatch.setattr("shmllm.frontend.streaming.CHUNK_SIZE", 1)
    params = SamplingParams(max_tokens=3)
    found = list(llm.stream(([5, n % 100] for n in range(200)), params, ordered=ordered))
    assert sorted(output.prompt_index for output in found) == [*range(200)]
    assert engine.most == 3
