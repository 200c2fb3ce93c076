"""Images in requests to engine processes: what travels, who shares it, and what ends in between.

Tokens are compared with those of transformers, or of the same request alone. test_image_engines.py
has engines that are started for one test, tests/e2e/test_images.py what needs no process.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from support.engines import assert_idle, assert_unused, named_engine, run_a_little, slow_steps
from support.interrupting import Moment, raising_handler
from support.programs import kill, read_line, start_source, watched
from support.raw_front_end import RawFrontEnd
from support.variants import slow
from support.vision_models import make_vision_model, reference_tokens
from support.waiting import PATIENCE_S, holds_within, join_all

from shmllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    SamplingParams,
)
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.items import HEADER
from shmllm.wire.messages import PromptItem, RecordKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
CACHE_BYTES = 60_000
"""Four tiles of the small models."""
BASE: dict[str, Any] = {
    "max_model_len": 512,
    "num_threads": 1,
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**26,
}
NUM_MOMENTS = 25
SENDING = ("shmllm/client/", "shmllm/ipc/", "shmllm/wire/", "shmllm/frontend/dispatcher")


class Subject(NamedTuple):
    """A model of transformers', and its directory."""

    model: Any
    directory: Path


def make(name: str, tmp_path_factory: Any) -> Subject:
    directory = tmp_path_factory.mktemp("models") / name
    return Subject(make_vision_model(name, directory), directory)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: Any) -> Subject:
    return make("smolvlm", tmp_path_factory)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: Any) -> Subject:
    return make("llava", tmp_path_factory)


@pytest.fixture(scope="module")
def private(smolvlm: Subject) -> Iterator[LLM]:
    """Its images have one tile, unless a prompt says otherwise."""
    options = BASE | {"mm_processor_cache_gb": CACHE_BYTES / 2**30}
    with LLM(str(smolvlm.directory), mm_processor_kwargs=side(64), **options) as llm:
        yield llm


@pytest.fixture
def llm(private: LLM) -> Iterator[LLM]:
    yield private
    assert_idle(private)
    channel = private._client._channel  # type: ignore[attr-defined]
    assert holds_within(lambda: channel.slots.num_free == channel.slots.num_slots, PATIENCE_S)
    assert private.engine_errors() == []


@pytest.fixture(scope="module")
def engine(llava: Subject, tmp_path_factory: Any) -> Iterator[str]:
    options = {"max_model_len": 512, "mm_processor_cache_gb": CACHE_BYTES / 2**30}
    with named_engine(tmp_path_factory.mktemp("log"), model=str(llava.directory), **options) as (
        name,
        _,
    ):
        yield name


@pytest.fixture
def name(engine: str) -> Iterator[str]:
    yield engine
    assert_unused(engine)


def picture(number: int) -> Any:
    pixels = np.random.default_rng(number).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def side(pixels: int) -> dict[str, Any]:
    """The options with which the longer side of an image becomes so long."""
    return {"size": {"longest_edge": pixels}}


def prompt(text: str, *pictures: Any) -> dict[str, Any]:
    """A prompt with an image at each "#"."""
    return {"prompt": text.replace("#", "<image>"), "multi_modal_data": {"image": [*pictures]}}


def pairs(*numbers: tuple[int, int]) -> list[Any]:
    return [prompt("See # and #", *(picture(each) for each in pair)) for pair in numbers]


def tokens(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def expected(model: Any, llm: LLM, given: dict[str, Any]) -> list[int]:
    """transformers' tokens."""
    (prepared,) = llm.front_end.prepare([given])
    submitted = prepared.submitted
    return reference_tokens(model, submitted.prompt_token_ids, submitted.items, MAX_TOKENS)


class SentImages:
    """A watcher of a channel. `with_pixels` says of each image that was sent whether its pixels
    were."""

    def __init__(self, llm: LLM) -> None:
        self.with_pixels: list[bool] = []
        llm._client._channel.watch(self)  # type: ignore[attr-defined]

    def sent(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        if kind == RecordKind.PROMPT_ITEM:
            self.with_pixels.append(num_bytes > HEADER.size + 80)

    def received(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        """Nothing."""


def test_pixels_are_sent_once(llm: LLM, smolvlm: Subject) -> None:
    sent = SentImages(llm)
    one = prompt("See #!", picture(1))
    large = {**prompt("#", picture(2)), "mm_processor_kwargs": side(256)}
    (first,), (second,) = tokens(llm, [one]) + tokens(llm, [one])
    assert first == second == expected(smolvlm.model, llm, one)
    assert sent.with_pixels == [True, False]
    params = SamplingParams(n=3, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert tokens(llm, [one], params) == [[first] * 3]
    assert not any(sent.with_pixels[1:])
    sent.with_pixels.clear()
    wanted = expected(smolvlm.model, llm, large)
    assert tokens(llm, [large] * 2) == [[wanted]] * 2
    assert sent.with_pixels == [True] * 2, "it is larger than what is kept"
    assert tokens(llm, [one]) == [[first]]
    sent.with_pixels.clear()
    many = [prompt("#", picture(number)) for number in range(10, 20)]
    assert tokens(llm, many) == tokens(llm, many)
    assert sent.with_pixels == [True] * 20, "each makes room for the next"


def test_a_conversation_has_processor_kwargs_of_its_own(llm: LLM) -> None:
    part = {"type": "image_pil", "image_pil": picture(2)}
    messages = [{"role": "user", "content": [part]}]

    def length(given: Any) -> int:
        prompts = llm.front_end.chat_prompts(messages, mm_processor_kwargs=given)
        return len(prompts[0]["prompt_token_ids"])

    assert length(side(256)) > length(side(64)) == length(None)


def test_an_interrupt_while_images_are_sent_leaves_both_ends_agreeing(llm: LLM) -> None:
    known = [(a, b) for a in range(4) for b in range(4)]
    wanted = dict(zip(known, tokens(llm, pairs(*known)), strict=True))
    draw = random.Random(17)
    one = SamplingParams(max_tokens=1)
    everything = Moment(-1, SENDING)
    everything.call(lambda: tokens(llm, pairs((90, 91)), one))
    num_points = -1 - everything._left
    with raising_handler():
        for number in range(NUM_MOMENTS):
            pair, new = draw.choice(known), (100 + number, 200 + number % 3)
            moment = Moment(draw.randrange(1, num_points), SENDING)
            moment.call(lambda pair=pair, new=new: tokens(llm, pairs(pair, new), one))  # type: ignore[misc]
            pair = draw.choice(known)
            assert tokens(llm, pairs(pair)) == [wanted[pair]], moment.where


def test_a_sleep_in_the_middle_of_requests_changes_no_token(llm: LLM) -> None:
    given = [prompt("See # and #", picture(number), picture(number + 1)) for number in range(4)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    wanted = tokens(llm, given, params)
    with slow_steps(llm):
        llm.enqueue(given, params, use_tqdm=False)
        run_a_little(llm, 12)
        llm.sleep(1, mode="keep")
        llm.wake_up()
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [[list(output.outputs[0].token_ids)] for output in outputs] == wanted


def test_other_calls_take_images(llm: LLM, smolvlm: Subject) -> None:
    given = prompt("See # now", picture(3))
    (wanted,) = tokens(llm, [given])[0]
    (found,) = llm.beam_search([given], BeamSearchParams(1, max_tokens=6, ignore_eos=True))
    assert found.sequences[0].tokens[-6:] == wanted[:6]
    *_, last = llm.stream([given], GREEDY)
    assert last.outputs[0].token_ids == wanted
    longest = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([given], longest, use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 512
    vectors = [llm.embed([each], use_tqdm=False)[0].outputs.embedding for each in [given] * 2]
    (other,) = llm.embed([prompt("See # now", picture(4))], use_tqdm=False)
    assert vectors[0] == vectors[1] != other.outputs.embedding


def test_front_ends_share_no_names_of_images(name: str, llava: Subject) -> None:
    with LLM.attach(name) as one, LLM.attach(name) as other:
        given = [prompt("See #!", picture(number)) for number in range(2)]
        wanted = [expected(llava.model, one, each) for each in given]
        named = [{**each, "multi_modal_uuids": {"image": "mine"}} for each in given]
        for _ in range(2):
            assert tokens(one, [named[0]]) == [[wanted[0]]]
            assert tokens(other, [named[1]]) == [[wanted[1]]]


def test_front_ends_at_once_get_their_own_tokens(name: str) -> None:
    given = [prompt("See # and #", picture(n % 3), picture(n + 9)) for n in range(8)]
    with LLM.attach(name) as one, LLM.attach(name) as other:
        wanted = [tokens(one, [each])[0] for each in given]
        found: list[Any] = []

        def ask(llm: LLM, order: int) -> None:
            for _ in range(3):
                found.append(tokens(llm, given[::order])[::order])

        threads = [
            threading.Thread(target=ask, args=each) for each in ((one, 1), (other, -1), (one, -1))
        ]
        for thread in threads:
            thread.start()
        join_all(threads)
        assert found == [wanted] * 9


def change(model: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Change all weights whose names have one of these parts. Returns them."""
    found = {
        name: value
        for name, value in model.state_dict().items()
        if value.is_floating_point() and any(part in name for part in names)
    }
    with torch.no_grad():
        for value in found.values():
            value.add_(torch.randn_like(value) * 0.05)
    return found


def test_updates_forget_what_other_weights_made_of_images(
    name: str, llava: Subject, tmp_path: Path
) -> None:
    model = type(llava.model)(llava.model.config).eval()
    model.load_state_dict(llava.model.state_dict())
    model.generation_config.eos_token_id = None
    model.vision_family = "llava"
    with LLM.attach(name) as llm:
        given = prompt("See # and # now", picture(1), picture(2))
        found = [tokens(llm, [given])]
        torch.manual_seed(5)
        llm.update_weights(change(model, ("vision", "projector")))
        found.append(tokens(llm, [given]))
        assert found[-1] == [[expected(model, llm, given)]], "after an update of the tower"
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm, [given]) == found[-1]
        change(model, ("",))
        model.save_pretrained(tmp_path)
        for weights in (
            lambda: model.state_dict(),
            lambda: safetensors.torch.load_file(tmp_path / "model.safetensors"),
        ):
            llm.sleep(2)
            llm.wake_up(tags=["weights"])
            llm.update_weights(weights())
            llm.wake_up()
            found.append(tokens(llm, [given]))
            assert found[-1] == [[expected(model, llm, given)]]
        assert len({str(each) for each in found}) == 3
        llm.update_weights(llava.model.state_dict())
        assert tokens(llm, [given]) == found[0]


SENDS_IMAGES = """
import sys
import numpy as np
from PIL import Image
from shmllm import LLM, SamplingParams
def picture(number):
    pixels = np.random.default_rng(number).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
prompts = [
    {"prompt": "<image><image>", "multi_modal_data": {"image": [picture(n % 5), picture(n)]}}
    for n in range(30)
]
with LLM.attach(sys.argv[1]) as llm:
    print("attached", flush=True)
    while True:
        llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
"""


@pytest.mark.parametrize("count", [1, slow(20)])
def test_a_front_end_that_is_killed_while_it_sends_disturbs_no_other(name: str, count: int) -> None:
    given = [prompt("See # and #", picture(n), picture(n + 1)) for n in range(4)]
    draw = random.Random(7)
    with LLM.attach(name) as llm:
        wanted = tokens(llm, given)
        for _ in range(count):
            client = start_source(SENDS_IMAGES, name)
            with watched(client):
                assert read_line(client) == b"attached\n"
                before = llm.get_metrics()["prompt_tokens"]
                least = before + draw.randrange(1, 4000)
                holds_within(lambda least=least: llm.get_metrics()["prompt_tokens"] > least, 5)  # type: ignore[misc]
                kill(client)
            assert tokens(llm, given) == wanted


def test_a_front_end_that_reads_nothing_delays_no_other(name: str) -> None:
    given = [prompt("See #", picture(1))]
    with LLM.attach(name) as llm:
        wanted = tokens(llm, given)
        (prepared,) = llm.front_end.prepare(given)
        (item,) = prepared.submitted.items
        raw = RawFrontEnd(name).enter()
        first = EngineCoreRequest(
            100, prepared.submitted.prompt_token_ids, SamplingParams(max_tokens=1), items=(item,)
        )
        raw.client.add(first)
        long = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20)
        for number in range(100):
            message = codec.encode_prompt_item(PromptItem(number, item))
            raw.channel.try_send(RecordKind.PROMPT_ITEM, *message)
            request = EngineCoreRequest(number, prepared.submitted.prompt_token_ids, long)
            raw.channel.try_send(RecordKind.ADD, *codec.encode_add(request))
        for _ in range(3):
            assert tokens(llm, given) == wanted
        raw.client.close()


def test_a_coroutine_that_is_cancelled_ends_its_images_only(name: str) -> None:
    given = [prompt("See # and #", picture(n), picture(n + 1)) for n in range(4)]
    with LLM.attach(name) as llm:
        wanted = [each[0] for each in tokens(llm, given)]

    async def ask(llm: AsyncLLM, index: int, number: int) -> list[int]:
        async for output in llm.generate(given[index], GREEDY, f"{number}"):
            found = list(output.outputs[0].token_ids)
        return found

    async def run() -> list[Any]:
        with closing(AsyncLLM.attach(name)) as llm:
            tasks = [asyncio.create_task(ask(llm, n % 4, n)) for n in range(24)]
            await asyncio.sleep(0.02)
            for task in tasks[::3]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            return [*found, *[await ask(llm, index, 100 + index) for index in range(4)]]

    found = asyncio.run(run())
    for number, each in enumerate(found):
        assert each == wanted[number % 4] or isinstance(each, asyncio.CancelledError)
    assert found[-4:] == wanted
