"""SentItems and SessionItems agree on what the engine keeps, whatever is sent and interrupted."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shmllm.client.sent_items import SentItems
from shmllm.engine import session_items
from shmllm.engine.session_items import SessionItems
from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.tensors import TensorRef
from shmllm.params.items import MODALITIES, Grid, Item, Modality
from shmllm.wire.messages import PromptItem

MOST = 1000
NO_IMAGES = (
    ((1, 2, 2, 3), np.float32),
    ((2, 2, 3), np.uint8),
    ((0, 2, 2, 3), np.uint8),
)


class Tensors:
    """Reads tensors that are there already, by the number of their slot."""

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}

    def put(self, array: Any) -> bytes:
        number = len(self.arrays)
        self.arrays[number] = array
        name = "uint8" if array.dtype == np.uint8 else "float32"
        return TensorRef(SlotRef(number, 0, array.nbytes), name, array.shape).encode()

    @contextmanager
    def view(self, ref: TensorRef) -> Any:
        class View:
            def numpy(_) -> Any:
                return self.arrays[ref.slot.slot]

        yield View()


@pytest.fixture
def tensors() -> Tensors:
    return Tensors()


@pytest.fixture
def session(tensors: Tensors) -> SessionItems:
    return SessionItems(tensors)  # type: ignore[arg-type]


def image(name: int, side: int = 10) -> Item:
    pixels = np.full((1, side, 1, 3), name % 256, np.uint8)
    return Item(name.to_bytes(32, "little"), ((0, 1),), (1, 1, 1), pixels)


def send(
    sent: SentItems,
    session: SessionItems,
    tensors: Tensors,
    item: Item,
    number: int = 1,
    num_steps: int = 3,
) -> bool:
    """Send an item, or begin to. Returns whether its pixels were sent.

    Args:
        number: the number of the request.
        num_steps: how many of the three steps are made before a signal ends it.
    """
    bare = Item(item.identity, item.spans, item.grid)
    if sent.has(item):
        session.keep(PromptItem(number, bare), 10, MOST)
        return False
    forgotten = sent.make_room(item)
    if num_steps > 1:
        session.keep(PromptItem(number, bare, tensors.put(item.data), forgotten), 10, MOST)
    if num_steps > 2:
        sent.sent(item)
    return True


def test_the_pixels_of_a_known_item_are_sent_once(session: SessionItems, tensors: Tensors) -> None:
    sent = SentItems(MOST)
    assert send(sent, session, tensors, image(1))
    assert not send(sent, session, tensors, image(1))
    first, second = session.take(1)
    assert first.data is second.data
    assert np.array_equal(first.data, image(1).data)
    assert session.take(1) == ()


def test_items_of_a_request_that_never_came_are_dropped(
    session: SessionItems, tensors: Tensors
) -> None:
    send(SentItems(MOST), session, tensors, image(1))
    assert session.take(2) == ()
    assert session.take(1) == ()


def test_an_item_larger_than_the_limit_is_used_and_not_kept(
    session: SessionItems, tensors: Tensors
) -> None:
    sent = SentItems(20)
    assert send(sent, session, tensors, image(1))
    assert session.num_bytes == 0
    assert session.take(1)[0].data is not None
    assert send(sent, session, tensors, image(1))


def test_both_ends_agree_whatever_is_sent(session: SessionItems, tensors: Tensors) -> None:
    draw = random.Random(3)
    sent = SentItems(MOST)
    num_sent = 0
    for number in range(3000):
        name = draw.randrange(60)
        item = image(name, 1 + 3 * name)
        if draw.random() < 0.2:
            send(sent, session, tensors, item, number, num_steps=draw.randrange(1, 3))
            continue
        pixels_sent = send(sent, session, tensors, item, number)
        num_sent += pixels_sent
        (got,) = session.take(number)
        assert np.array_equal(got.data, item.data)
        if pixels_sent:
            assert session.num_bytes <= MOST
    assert 200 < num_sent < 2900


def test_an_identity_of_the_engine_covers_data_kind_and_grid(
    session: SessionItems, tensors: Tensors
) -> None:
    def identity(name: int, value: int, grid: Grid = (1, 1, 1)) -> bytes:
        item = replace(image(name), grid=grid, data=np.full((1, 2, 2, 3), value, np.uint8))
        send(SentItems(MOST), session, tensors, item)
        (got,) = session.take(1)
        return got.identity

    assert identity(1, 1) == identity(1, 1)
    assert len({identity(1, 1), identity(1, 2), identity(2, 1), identity(1, 1, (1, 2, 1))}) == 4
    first = identity(1, 1)
    bare = Item(image(1).identity, ((0, 1),), (1, 1, 1))
    session.keep(PromptItem(1, bare), 10, MOST)
    changes: list[Any] = [{"grid": (2, 1, 1)}, {"modality": "video"}, {"frame_seconds": 0.5}]
    changes.append({"is_embeds": True})
    for change in changes:
        session.keep(PromptItem(1, replace(bare, **change)), 10, MOST)
    same, *others = session.take(1)
    assert same.identity == first
    assert len({first, *(each.identity for each in others)}) == 5


def test_items_of_interrupted_requests_do_not_add_up(
    session: SessionItems, tensors: Tensors
) -> None:
    for number in range(5):
        for name in range(7):
            send(SentItems(MOST), session, tensors, image(name, 1), number)
    assert len(session.take(4)) == 7


@pytest.mark.parametrize(
    "array",
    [np.zeros(shape, dtype) for shape, dtype in NO_IMAGES],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_is_no_image_is_refused(array: Any, session: SessionItems, tensors: Tensors) -> None:
    message = PromptItem(1, Item(bytes(32), ((0, 1),), (1, 1, 1)), tensors.put(array))
    with pytest.raises(ProtocolMismatchError, match="the data of PROMPT_ITEM"):
        session.keep(message, 10, MOST)


@pytest.mark.parametrize("modality", MODALITIES)
def test_embeddings_are_rows_of_floating_numbers(
    modality: Modality, session: SessionItems, tensors: Tensors
) -> None:
    item = replace(Item(bytes(32), ((0, 2),), (1, 1, 1), None, modality), is_embeds=True)
    session.keep(PromptItem(1, item, tensors.put(np.ones((2, 3), np.float32))), 10, MOST)
    assert session.take(1)[0].data.tolist() == [[1.0] * 3] * 2
    for array in (np.ones((1, 2, 3), np.float32), np.ones((2, 3), np.uint8), np.ones((0, 3), "f")):
        with pytest.raises(ProtocolMismatchError, match="the data of PROMPT_ITEM"):
            session.keep(PromptItem(1, item, tensors.put(array)), 10, MOST)


def test_unknown_and_too_many_items_are_refused(
    session: SessionItems, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Item(bytes(32), ((0, 1),), (1, 1, 1))
    with pytest.raises(ProtocolMismatchError, match="names none that are kept"):
        session.keep(PromptItem(1, bare), 10, MOST)
    monkeypatch.setattr(session_items, "MOST_ITEM_BYTES", 29)
    with pytest.raises(ProtocolMismatchError, match="PROMPT_ITEM of 30 bytes"):
        session.keep(PromptItem(1, bare, tensors.put(image(1).data)), 10, MOST)
    monkeypatch.setattr(session_items, "MOST_ITEM_BYTES", 30)
    monkeypatch.setattr(session_items, "MOST_EXCESS_BYTES", 0)
    with pytest.raises(ProtocolMismatchError, match="items of 30 bytes are to be kept"):
        session.keep(PromptItem(1, bare, tensors.put(image(1).data)), 10, 20)
    session.take(1)
    for _ in range(3):
        session.keep(PromptItem(1, bare), 3, MOST)
    with pytest.raises(ProtocolMismatchError, match="more items than a request can have"):
        session.keep(PromptItem(1, bare), 3, MOST)
