"""Prompts with images: transformers' greedy tokens, and the same bits in all settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from support.determinism import said
from support.image_llms import prepared_of
from support.reference_models import VARIANTS
from support.variants import slow
from support.vision_models import (
    ALIKE,
    TWO_SIZES,
    VISION_FAMILIES,
    make_vision_model,
    reference_tokens,
)

from shmllm import LLM, AsyncLLM, BeamSearchParams, RequestError, RequestOutput, SamplingParams
from shmllm.worker import loading

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MAX_TOKENS = 12
BASE: dict[str, Any] = {
    **{"max_model_len": 512, "num_threads": 1, "multiprocess": False},
    "mamba_block_size": 16,
}
FAMILIES = [
    name if name in ("smolvlm", "qwen3_vl", "gemma3") else slow(name) for name in VISION_FAMILIES
]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 100, "long_prefill_token_threshold": 7},
    "few blocks": {"max_model_len": 224},
    "no cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "large blocks": {"block_size": 64},
}
LARGER = {"chunks": {"max_num_batched_tokens": 900}, "few blocks": {"max_model_len": 1792}}
"""What images of hundreds of embeddings need."""
FEW_BLOCKS = {
    "exaone4_5": 30,
    "gemma3": 24,
    "gemma4": 37,
    "gemma4-large": 37,
    "gemma4_unified": 37,
    "llama4": 27,
}
FEW_BLOCKS |= {"got_ocr2": 13, "janus": 12, "kimi_k25": 12, "muse_glimmer": 34, "paligemma": 12}
FEW_BLOCKS |= {"deepseek_ocr": 140, "deepseek_ocr2": 140, "minicpm_ocr": 17}
"""The size of a pool that has room for about two prompts."""


class Subject(NamedTuple):
    """A model of transformers', and its directory."""

    name: str
    model: Any
    directory: Path


@pytest.fixture(
    scope="module",
    params=[
        slow(name) if name in (*ALIKE, *TWO_SIZES, "minimax_m3") else name
        for name in VISION_FAMILIES
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Subject:
    return make(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=FAMILIES)
def some_subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Subject:
    return make(request.param, tmp_path_factory)


def base_of(subject: Subject, **options: Any) -> dict[str, Any]:
    """The options of an engine; images of some families have hundreds of embeddings."""
    length = {"max_model_len": 2048} if subject.name in TWO_SIZES else {}
    return BASE | length | options


def make(name: str, tmp_path_factory: Any, **text: Any) -> Subject:
    directory = tmp_path_factory.mktemp("models") / name
    return Subject(name, make_vision_model(name, directory, **text), directory)


@pytest.fixture(scope="module")
def pictures() -> list[Any]:
    """Noise, a gradient of another shape, and a picture with one colour."""
    noise = np.random.default_rng(5).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    slope = (np.indices((140, 70)).sum(0)[..., None] * np.array([1, 2, 3]) % 256).astype(np.uint8)
    return [Image.fromarray(noise), Image.fromarray(slope), Image.new("RGB", (64, 64), "teal")]


def prompts_of(llm: LLM, pictures: list[Any]) -> list[Any]:
    """Prompts with and without images, some with the same ones."""
    noise, slope, plain = pictures
    mark = llm.front_end.items.mark("image")

    def with_images(text: str, *images: Any) -> dict[str, Any]:
        return {"prompt": text.replace("#", mark), "multi_modal_data": {"image": [*images]}}

    return [
        with_images("See # now?", noise),
        with_images("Both # and # here", noise, slope),
        with_images("Both # and # here", slope, noise),
        with_images("##", plain, plain),
        "only text, and some more of it",
        with_images(f"{'a long beginning ' * 4}# end", slope),
        with_images("See # now!", plain),
    ]


def generate(llm: LLM, prompts: list[Any], logprobs: int | None = 3) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=logprobs
    )
    return llm.generate(prompts, params, use_tqdm=False)


def expected(subject: Subject, llm: LLM, prompt: Any, output: RequestOutput) -> list[int]:
    """transformers' tokens for a prompt, from the pixels that the front end has made."""
    images = prompt["multi_modal_data"]["image"] if isinstance(prompt, dict) else []
    prepared = prepared_of(llm, images)
    return reference_tokens(subject.model, output.prompt_token_ids, prepared, MAX_TOKENS)


def test_greedy_tokens_are_those_of_transformers(subject: Subject, pictures: list[Any]) -> None:
    with LLM(str(subject.directory), **base_of(subject)) as llm:
        prompts = prompts_of(llm, pictures)
        outputs = generate(llm, prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            found = list(output.outputs[0].token_ids)
            assert found == expected(subject, llm, prompt, output)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ministral3", "mistral4"])
def test_greedy_tokens_of_other_language_models_are_those_of_transformers(
    kind: str, pictures: list[Any], tmp_path_factory: Any
) -> None:
    text = {"model_type": kind, **VARIANTS[kind][1]}
    test_greedy_tokens_are_those_of_transformers(
        make("mistral3", tmp_path_factory, **text), pictures
    )


@pytest.mark.slow
def test_tokens_of_images_may_be_causal(pictures: list[Any], tmp_path_factory: Any) -> None:
    """As in Gemma 4's small models."""
    text = {"use_bidirectional_attention": None}
    test_greedy_tokens_are_those_of_transformers(make("gemma4", tmp_path_factory, **text), pictures)


@pytest.mark.slow
def test_an_image_that_no_step_has_room_for_is_refused(
    pictures: list[Any], tmp_path_factory: Any
) -> None:
    """Those of Gemma 4's larger models attend to all of an image, which may have any size."""
    subject = make("gemma4-large", tmp_path_factory)
    with LLM(str(subject.directory), **base_of(subject) | {"max_num_batched_tokens": 65}) as llm:
        prompts = prompts_of(llm, pictures)
        (first,) = generate(llm, prompts[:1])
        assert list(first.outputs[0].token_ids) == expected(subject, llm, prompts[0], first)
        large = {**prompts[0], "mm_processor_kwargs": {"max_soft_tokens": 140}}
        with pytest.raises(RequestError, match=r"image 1 has 1\d\d embeddings .* room for 65"):
            generate(llm, [large])
        assert said(generate(llm, prompts[:1])[0]) == said(first)


def test_no_bit_depends_on_chunks_caches_and_preemption(
    some_subject: Subject, pictures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_EMBEDS", 0)  # the smallest encoder cache
    first: list[Any] | None = None
    few = {
        "num_gpu_blocks_override": FEW_BLOCKS.get(some_subject.name, 15),
        "scheduler_reserve_full_isl": False,
    }
    larger = LARGER if some_subject.name in TWO_SIZES else {}
    for name, options in SETTINGS.items():
        options = {"dtype": "float32"} | options | larger.get(name, {})
        options |= few if name == "few blocks" else {}
        with LLM(str(some_subject.directory), **base_of(some_subject, **options)) as llm:
            prompts = prompts_of(llm, pictures)
            found = [said(output) for output in generate(llm, prompts)]
            assert first is None or found == first, name
            first = found
            again = generate(llm, prompts)
            assert [said(output) for output in again] == first, f"{name}, from the prefix cache"
            alone = [said(generate(llm, [prompt])[0]) for prompt in reversed(prompts)]
            assert alone[::-1] == first, f"{name}, one at a time"
            if name == "few blocks":
                assert llm.get_metrics()["preemptions"] > 0


def test_a_hit_may_end_inside_an_image(some_subject: Subject, pictures: list[Any]) -> None:
    with LLM(
        str(some_subject.directory),
        **base_of(some_subject) | {"block_size": 8, "mamba_block_size": 8},
    ) as llm:
        mark = llm.front_end.items.mark("image")
        image = {"image": pictures[0]}
        first = {"prompt": f"Here: {mark} one", "multi_modal_data": image}
        (alone,) = generate(llm, [first])
        llm.reset_prefix_cache()
        (before,) = generate(llm, [{**first, "prompt": f"Here: {mark} two and more"}])
        (output,) = generate(llm, [first])
        (items,) = llm.front_end.prepare([first])
        ends = [item.end for item in items.submitted.items]
        cached = output.num_cached_tokens or 0
        assert said(output) == said(alone)
        if some_subject.name.startswith("paligemma"):  # a key depends on the whole prompt
            assert cached == 0
        else:
            assert 0 < cached <= max(ends) + 8
        assert before.num_cached_tokens == 0


def test_images_that_change_places_are_no_hits(some_subject: Subject, pictures: list[Any]) -> None:
    with LLM(str(some_subject.directory), **base_of(some_subject)) as llm:
        mark = llm.front_end.items.mark("image")
        text = f"{mark}{mark} which?"
        orders = [pictures[:2], pictures[1::-1]]
        prompts = [{"prompt": text, "multi_modal_data": {"image": order}} for order in orders]
        outputs = [generate(llm, [prompt])[0] for prompt in prompts]
        first = expected(some_subject, llm, prompts[0], outputs[0])
        second = expected(some_subject, llm, prompts[1], outputs[1])
        assert [list(output.outputs[0].token_ids) for output in outputs] == [first, second]


def test_an_image_is_encoded_once(
    some_subject: Subject, pictures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(
        str(some_subject.directory), **base_of(some_subject) | {"enable_prefix_caching": False}
    ) as llm:
        cache = llm.front_end.client._core.scheduler.encoder_cache  # type: ignore[attr-defined]
        prompt = prompts_of(llm, pictures)[0]
        (first,) = generate(llm, [prompt])
        encoded = cache.num_encoded
        (second,) = generate(llm, [prompt])
        num_parts = len(prepared_of(llm, pictures[:1]))
        assert (encoded, cache.num_encoded) == (num_parts, num_parts)
        llm.reset_encoder_cache()
        llm.reset_mm_cache()
        (third,) = generate(llm, [prompt])
        assert cache.num_encoded == 2 * num_parts
        assert said(third) == said(first)
        assert said(first) == said(second)


def test_the_number_of_threads_changes_no_bit(some_subject: Subject, pictures: list[Any]) -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            options = base_of(some_subject, num_threads=threads, dtype="float32")
            with LLM(str(some_subject.directory), **options) as llm:
                found.append([said(each) for each in generate(llm, prompts_of(llm, pictures))])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: Any) -> Iterator[LLM]:
    subject = make("llava", tmp_path_factory)
    with LLM(str(subject.directory), **BASE, limit_mm_per_prompt={"image": 2}) as llm:
        yield llm


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (
        {"prompt": "<image>" * 3, "multi_modal_data": {"image": [Image.new("RGB", (9, 9))] * 3}},
        "prompt 1 has 3 images; limit_mm_per_prompt allows 2",
    ),
    "marks": (
        {"prompt": "x", "multi_modal_data": {"image": Image.new("RGB", (9, 9))}},
        "image",
    ),
    "damaged": (
        {"prompt": "<image>", "multi_modal_data": {"image": b"\x89PNG\r\n\x1a\nabc"}},
        "prompt 1: image 1 has an unknown format",
    ),
    "video": (
        {"prompt": "x", "multi_modal_data": {"video": [1]}},
        "the model takes no videos",
    ),
    "uuids": (
        {
            "prompt": "<image>",
            "multi_modal_data": {"image": Image.new("RGB", (9, 9))},
            "multi_modal_uuids": {"image": ["a", "b"]},
        },
        "has 1 image and 2 uuids of them",
    ),
    "unknown uuid": (
        {"prompt": "<image>", "multi_modal_uuids": {"image": ["gone"]}},
        "no image with the uuid 'gone' is kept",
    ),
    "kwargs": (
        {
            "prompt": "<image>",
            "multi_modal_data": {"image": Image.new("RGB", (9, 9))},
            "mm_processor_kwargs": {"max_pixels": 9},
        },
        "max_pixels",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED])
def test_what_is_wrong_is_one_error(case: str, llava: LLM) -> None:
    prompt, message = REFUSED[case]
    with pytest.raises(RequestError, match=message) as caught:
        generate(llava, ["good", prompt])
    assert "\n" not in str(caught.value)
    assert "prompt 1" in str(caught.value)
    assert len(generate(llava, ["good"])[0].outputs[0].token_ids) == MAX_TOKENS


def test_a_uuid_stands_for_an_image(llava: LLM, pictures: list[Any]) -> None:
    mark = llava.front_end.items.mark("image")
    image = {"image": pictures[0]}
    prompt = {"prompt": f"See {mark}", "multi_modal_data": image}
    named = {**prompt, "multi_modal_uuids": {"image": "mine"}}
    kept = {"prompt": f"See {mark}", "multi_modal_uuids": {"image": "mine"}}
    outputs = [generate(llava, [each])[0] for each in (prompt, named, kept)]
    first, *others = [list(output.outputs[0].token_ids) for output in outputs]
    assert others == [first, first]


def test_ids_may_have_the_mark_or_all_placeholders(llava: LLM, pictures: list[Any]) -> None:
    mark, data = llava.front_end.items.mark("image"), {"image": pictures[0]}
    (text,) = generate(llava, [{"prompt": f"See {mark} now", "multi_modal_data": data}])
    marked = llava.front_end.tokenizer.encode(f"See {mark} now")
    for ids in (marked, list(text.prompt_token_ids)):
        (output,) = generate(llava, [{"prompt_token_ids": ids, "multi_modal_data": data}])
        assert output.prompt_token_ids == text.prompt_token_ids
        assert said(output) == said(text)


def test_conversations_have_images(llava: LLM, pictures: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    pictures[0].save(path)
    llava.front_end.items.options = type(llava.front_end.items.options)(folder=str(tmp_path))
    forms = [
        {"type": "image_pil", "image_pil": pictures[0]},
        {"type": "image", "image": pictures[0]},
        {"type": "image_url", "image_url": {"url": f"file://{path}"}},
        {"type": "image_url", "image_url": f"file://{path}", "uuid": "named"},
    ]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    found = []
    for form in forms:
        content = [form, {"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": content}]
        (output,) = llava.chat(messages, params, use_tqdm=False)
        found.append((output.prompt_token_ids, list(output.outputs[0].token_ids)))
    assert found == [found[0]] * len(forms)
    for url, message in (
        ("http://x/y.png", "nothing is fetched"),
        ("file:///etc/passwd", "is not below the folder"),
        ("data:image/png;base64,AAAA", "unknown format"),
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(RequestError, match=message):
            llava.chat([{"role": "user", "content": [part]}], use_tqdm=False)


def test_scores_of_a_completion_know_the_images(llava: LLM, pictures: list[Any]) -> None:
    mark = llava.front_end.items.mark("image")
    prompts = [
        {"prompt": f"See {mark}", "multi_modal_data": {"image": each}} for each in pictures[:2]
    ]
    outputs = [output.outputs[0] for output in generate(llava, prompts, logprobs=0)]
    scores = llava.score_tokens(prompts, [list(output.token_ids) for output in outputs])
    for output, found in zip(outputs, scores, strict=True):
        entries = zip(output.logprobs, output.token_ids, strict=True)
        assert found == [entry[token].logprob for entry, token in entries]
    assert scores[0] != scores[1]


async def ends_of_chunks(directory: Path, chunks: list[Any]) -> list[RequestOutput]:
    async def arrive() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    async with AsyncLLM(str(directory), **BASE | {"multiprocess": True}) as llm:
        outputs = [output async for output in llm.generate(arrive(), params)]
    return [output for output in outputs if output.outputs[0].finish_reason is not None]


def test_completions_are_not_scored_as_ends_of_prompts_that_attend_to_them(
    tmp_path_factory: Any,
) -> None:
    """PaliGemma: the numbers would not be those of decoding."""
    subject = make("paligemma", tmp_path_factory)
    prompt = {"prompt_token_ids": [40, 41, 42]}
    with LLM(str(subject.directory), **BASE) as llm:
        with pytest.raises(RequestError, match="score_tokens is not possible for this model"):
            llm.score_tokens([prompt], [[50, 51]])
        with pytest.raises(RequestError, match="beam_search is not possible for this model"):
            llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4))


def test_chunks_keep_the_images_of_those_before(tmp_path: Path, pictures: list[Any]) -> None:
    make_vision_model("llava", tmp_path)
    images, mark = pictures[:2], "<image>"
    chunks = [
        {"prompt": f"See {mark}", "multi_modal_data": {"image": images[0]}},
        "and now",
        {"prompt": f"another {mark}", "multi_modal_data": {"image": images[1]}},
        "end",
    ]
    ends = asyncio.run(ends_of_chunks(tmp_path, chunks))
    with LLM(str(tmp_path), **BASE) as llm:
        for end, count in zip(ends, (1, 1, 2, 2), strict=True):
            whole = {"prompt_token_ids": end.prompt_token_ids}
            prompt = whole | {"multi_modal_data": {"image": images[:count]}}
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert said(output) == said(end)


def test_a_model_without_images_says_so(pictures: list[Any]) -> None:
    with LLM("tiny", max_model_len=64, num_threads=1, multiprocess=False) as llm:
        prompt = {"prompt": "x", "multi_modal_data": {"image": pictures[0]}}
        with pytest.raises(RequestError, match="the model takes no images"):
            llm.generate([prompt], use_tqdm=False)


def test_language_model_only_leaves_the_tower_out(tmp_path_factory: Any) -> None:
    subject = make("qwen3_vl", tmp_path_factory)
    sizes = []
    for only in (False, True):
        with LLM(str(subject.directory), **BASE, language_model_only=only) as llm:
            (output,) = generate(llm, ["some text"])
            sizes.append((llm.facts.weight_bytes, list(output.outputs[0].token_ids)))
            if only:
                with pytest.raises(RequestError, match="takes no images"):
                    generate(
                        llm,
                        [{"prompt": "x", "multi_modal_data": {"image": Image.new("L", (9, 9))}}],
                    )
    (with_tower, first), (without, second) = sizes
    assert with_tower > without
    assert first == second
