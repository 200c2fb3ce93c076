"""Images that no front end of ours sends: they are refused, or end the connection, and change
nothing for others.

A tower and a model that get what they cannot compute would end the engine in the middle of a step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from support.engines import assert_unused, named_engine
from support.hostile_items import REFUSED, SERVED, Hostile
from support.programs import is_running
from support.raw_front_end import CUT_OFF
from support.variants import slow
from support.vision_models import make_vision_model

from shmllm import LLM, EngineDeadError, SamplingParams
from shmllm.params.items import Item

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PICTURE = Image.fromarray(np.random.default_rng(5).integers(0, 256, (90, 130, 3), dtype=np.uint8))


class Engine(NamedTuple):
    name: str
    pid: int


@pytest.fixture(scope="module", params=["qwen3_vl", slow("llava"), slow("gemma3"), slow("smolvlm")])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("hostile")
    make_vision_model(request.param, directory / "model")
    options = {"model": str(directory / "model"), "max_model_len": 512}
    with named_engine(directory, **options) as found:
        yield Engine(*found)


class Good:
    """A front end whose tokens must not change."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        mark = llm.front_end.items.mark("image")
        self._prompt = {"prompt": f"See {mark}!", "multi_modal_data": {"image": PICTURE}}
        (prepared,) = llm.front_end.prepare([self._prompt])
        (self.item,) = prepared.submitted.items
        self.token_ids = list(prepared.submitted.prompt_token_ids)
        self._expected = self._tokens()

    def _tokens(self) -> list[int]:
        (output,) = self._llm.generate([self._prompt], GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def check(self) -> None:
        assert self._tokens() == self._expected
        self._llm.reset_prefix_cache()
        assert self._tokens() == self._expected


@pytest.fixture
def good(engine: Engine) -> Iterator[Good]:
    with LLM.attach(engine.name) as llm:
        found = Good(llm)
        yield found
        assert is_running(engine.pid)
        found.check()
    assert_unused(engine.name)


def ask(engine: Engine, items: Sequence[Item], token_ids: Sequence[int]) -> str:
    """As a front end of its own. Returns CUT_OFF if that has ended the connection."""
    front_end = Hostile(engine.name)
    front_end.enter()
    try:
        return front_end.ask(items, token_ids)
    except EngineDeadError as error:
        return CUT_OFF if CUT_OFF in str(error) else str(error)
    finally:
        front_end.client.close()


def changed(item: Item) -> dict[str, tuple[list[Item], str]]:
    """What is done to an item, and what the engine has to answer."""
    tiles, rows, columns = item.grid
    begin, count, pixels = item.start, item.num_embeds, item.data
    frames = replace(
        item,
        grid=(tiles + 1, rows, columns),
        data=np.concatenate([pixels, pixels[:1]]),
        spans=((begin, begin + count // tiles * (tiles + 1)),),
    )
    return {
        "nothing": ([item], SERVED),
        "other pixels under its name": ([replace(item, data=255 - pixels)], SERVED),
        "behind the prompt": ([replace(item, spans=((500, 500 + count),))], REFUSED),
        "twice in one place": ([item, item], REFUSED),
        "fewer embeddings": ([replace(item, spans=((begin, begin + count - 1),))], REFUSED),
        "more embeddings": ([replace(item, spans=((begin, begin + count + 1),))], REFUSED),
        "other grid": ([replace(item, grid=(tiles + 7, rows + 1, columns))], REFUSED),
        "huge grid": ([replace(item, grid=(2**32 - 1,) * 3)], REFUSED),
        "no tiles": ([replace(item, grid=(0, rows, columns))], REFUSED),
        "more tiles": ([frames], ""),
        "empty pixels": ([replace(item, data=pixels[:0])], CUT_OFF),
        "floating pixels": ([replace(item, data=pixels.astype(np.float32))], CUT_OFF),
        "four channels": ([replace(item, data=np.zeros((1, 4, 4, 4), np.uint8))], REFUSED),
        "a video": ([replace(item, modality="video", frame_seconds=1.0)], REFUSED),
        "a sound": ([replace(item, modality="audio")], CUT_OFF),
        "a name that nobody sent": ([replace(item, identity=bytes(32), data=None)], CUT_OFF),
        "embeddings apart": ([replace(item, spans=((0, 1), (3, 2 + count)))], ""),
    }


def test_no_image_ends_the_engine(engine: Engine, good: Good) -> None:
    for what, (items, expected) in changed(good.item).items():
        found = ask(engine, items, good.token_ids * 3)
        assert found == expected or not expected, what
        good.check()


def test_one_name_for_several_images_mixes_none_up(engine: Engine, good: Good) -> None:
    front_end = Hostile(engine.name)
    front_end.enter()
    dark = replace(good.item, data=good.item.data // 4)
    for item in (dark, replace(dark, data=None), good.item, replace(good.item, data=None)):
        assert front_end.ask([item], good.token_ids) == SERVED
        good.check()
    front_end.client.close()


def test_items_without_requests_end(engine: Engine, good: Good) -> None:
    front_end = Hostile(engine.name)
    front_end.enter()
    for number in range(1000):
        front_end.send_item(good.item, 2**40 + number // 40)
    assert front_end.ask([good.item], good.token_ids) == SERVED
    with pytest.raises(EngineDeadError, match=CUT_OFF):  # noqa: PT012
        for _ in range(600):
            front_end.send_item(replace(good.item, data=None), 2**41)
        front_end.ask([good.item], good.token_ids)
    front_end.client.close()


def random_items(draw: random.Random, good: Good) -> list[Item]:
    """One or two items, of which each may be wrong in some ways."""
    items: list[Item] = []
    position = draw.randrange(6)
    for _ in range(draw.randrange(1, 3)):
        item = good.item
        tiles, rows, columns = item.grid
        counts = [item.num_embeds] * 6 + [2 * item.num_embeds, draw.randrange(1, 60)]
        left, spans = draw.choice(counts), []
        while left > 0:
            length = draw.choice((left, left, left, draw.randrange(1, left + 1)))
            spans.append((position, position + length))
            left -= length
            position += length + draw.randrange(3)
        pixels = draw.choice((item.data, 255 - item.data, item.data[:, ::-1].copy()))
        if draw.random() < 0.2:
            shape = [max(0, side + draw.randrange(-1, 2) * 16) for side in pixels.shape[1:3]]
            pixels = np.zeros((draw.randrange(1, 3), *shape, 3), np.uint8)
        grid = draw.choice(((tiles, rows, columns), (tiles, columns, rows), (tiles + 1, rows, 2)))
        name = draw.choice((item.identity, bytes([draw.randrange(3)]) * 32))
        items.append(Item(name, tuple(spans), grid, draw.choice((pixels, pixels, None))))
    return items


def walk(engine: Engine, good: Good, count: int) -> None:
    seed = int(os.environ.get("SHMLLM_STRESS_SEED", 17))
    print(f"seed {seed}")
    draw = random.Random(seed)
    found = {SERVED: 0, REFUSED: 0, CUT_OFF: 0}
    for number in range(count):
        found[ask(engine, random_items(draw, good), good.token_ids * draw.randrange(1, 4))] += 1
        if number % 10 == 0:
            good.check()
    assert min(found.values()) > count // 50, found


def test_random_images_end_only_their_own_connection(engine: Engine, good: Good) -> None:
    walk(engine, good, 100)


@pytest.mark.slow
def test_many_random_images(engine: Engine, good: Good) -> None:
    walk(engine, good, 3000)
