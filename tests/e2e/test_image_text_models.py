"""Models that make vectors of texts and of images: the vectors are transformers', and each depends
on its own prompt alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.image_text_models import (
    KINDS,
    TEXTS,
    ImageTextModel,
    make_image_text_model,
    prompt_of,
    some_images,
)
from support.pooling_models import assert_vectors_close, rewrite_config
from support.variants import slow

from shmllm import LLM, EngineStartError, PoolingParams, RequestError

OPTIONS: dict[str, Any] = {"num_threads": 1, "multiprocess": False, "dtype": "float32"}
RAW = PoolingParams(use_activation=False)
TOLERANCE = 2e-5
GIVEN = [TEXTS[0], some_images()[0], *TEXTS[1:], *some_images()[1:]]
ALIKE = ("metaclip_2", "chinese_clip")
"""Kinds whose tower is CLIP's."""
EACH_KIND = [slow(kind) if kind in ALIKE else kind for kind in KINDS]
Models = Callable[[str], ImageTextModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, ImageTextModel] = {}

    def get(kind: str) -> ImageTextModel:
        if kind not in made:
            made[kind] = make_image_text_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def embedded(llm: LLM, given: list[Any], params: PoolingParams | None = None) -> list[Any]:
    outputs = llm.embed([prompt_of(each) for each in given], pooling_params=params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(given)
    return [output.outputs.array for output in outputs]


def assert_equals_transformers(model: ImageTextModel, **options: Any) -> None:
    with LLM(str(model.directory), **OPTIONS | options) as llm:
        found = embedded(llm, GIVEN, RAW)
        assert_vectors_close(found, [model.vector(each) for each in GIVEN], TOLERANCE)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_vectors_of_texts_and_images_equal_transformers(kind: str, models: Models) -> None:
    """In one batch; alone, again, in small steps and with few rows they have the same bits."""
    model = models(kind)
    wanted = [model.vector(each) for each in GIVEN]
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "block_size": 16}
    with (
        LLM(str(model.directory), **OPTIONS) as llm,
        LLM(str(model.directory), **OPTIONS | small) as few,
    ):
        found = embedded(llm, GIVEN, RAW)
        assert_vectors_close(found, wanted, TOLERANCE)
        for each, vector in zip(GIVEN, found, strict=True):
            assert (embedded(llm, [each], RAW)[0] == vector).all()
        again = embedded(few, [*GIVEN, *GIVEN], RAW)
        assert all((a == b).all() for a, b in zip(again, [*found, *found], strict=True))
        normalised = [each / each.norm() for each in wanted]
        assert_vectors_close(embedded(llm, GIVEN), normalised, TOLERANCE)
        score = llm.score(TEXTS[0], prompt_of(GIVEN[1]), use_tqdm=False)[0].outputs.score
        assert score == pytest.approx(float(normalised[0] @ normalised[1]), abs=1e-5)
        parts = {"content": [{"type": "image_pil", "image_pil": GIVEN[1]}]}
        assert llm.score(TEXTS[0], parts, use_tqdm=False)[0].outputs.score == score


@pytest.mark.parametrize("kind", EACH_KIND)
def test_prompts_are_those_of_transformers_or_refused(kind: str, models: Models) -> None:
    model, image = models(kind), some_images()[0]
    with LLM(str(model.directory), **OPTIONS) as llm:
        for text in TEXTS:
            (output,) = llm.embed(text, use_tqdm=False)
            assert output.prompt_token_ids == model.token_ids(text)
        ids = [5, 6, 7, 1]
        assert_vectors_close(embedded(llm, [ids], RAW), [model.vector(ids)], TOLERANCE)
        data = {"multi_modal_data": {"image": image}}
        (output,) = llm.embed({"prompt_token_ids": [0, 1], **data}, use_tqdm=False)
        assert output.prompt_token_ids == [0]
        for prompt, error in {
            "an image and a text": {"prompt": "2 3", **data},
            "an image and a text, and": {"prompt_token_ids": [5], **data},
            "has 2 images": {"prompt": "", "multi_modal_data": {"image": [image] * 2}},
            "may have at most 24": "2 " * 30,
        }.items():
            with pytest.raises(RequestError, match=prompt):
                llm.embed(error, use_tqdm=False)
        with pytest.raises(RequestError, match="cannot be truncated"):
            llm.embed(prompt_of(image), truncate_prompt_tokens=3, use_tqdm=False)
        (cut,) = llm.embed("2 " * 30, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 24


def test_more_images_than_a_step_computes_have_their_vectors(models: Models) -> None:
    given = [some_images()[number % 3] for number in range(24)]
    for number, image in enumerate(given):
        image.putpixel((0, 0), (number, 0, 0))
    with LLM(str(models("siglip").directory), **OPTIONS) as llm:
        together = embedded(llm, [*given[:20], TEXTS[0], *given[20:]])
        assert len({vector.tobytes() for vector in together}) == 25
        alone = [embedded(llm, [each])[0] for each in (given[0], given[19], TEXTS[0], given[23])]
        chosen = [together[number] for number in (0, 19, 20, 24)]
        assert all((a == b).all() for a, b in zip(alone, chosen, strict=True))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide vectors": ("clip", {"projection_dim": 72}),
    "other activations": (
        "clip",
        {"text": {"hidden_act": "gelu"}, "vision": {"hidden_act": "gelu", "layer_norm_eps": 1e-3}},
    ),
    "SigLIP's other activations": (
        "siglip",
        {"text": {"hidden_act": "gelu", "layer_norm_eps": 1e-3}, "vision": {"hidden_act": "gelu"}},
    ),
    "pixels beyond the last patch": ("siglip", {"vision": {"patch_size": 15}}),
}


@pytest.mark.parametrize("name", [*map(slow, VARIANTS)])
def test_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, fields = VARIANTS[name]
    assert_equals_transformers(make_image_text_model(kind, tmp_path, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_change_no_bits_of_images(kind: str, ranks: str, models: Models) -> None:
    assert_equals_transformers(models(kind), multiprocess=True, num_threads=2, **{ranks: 2})


@pytest.mark.slow
def test_the_first_files_of_clip_equal_transformers(tmp_path: Path) -> None:
    """They have fields in objects of other names, which take the place of all of the others."""
    model = make_image_text_model("clip", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    parts = {f"{name}_dict": values[name] for name in ("text_config", "vision_config")}
    wrong = {name: {"hidden_size": 8} for name in ("text_config", "vision_config")}
    rewrite_config(tmp_path, **parts, **wrong)
    assert_equals_transformers(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_alone_need_no_tower(kind: str, models: Models) -> None:
    model = models(kind)
    with LLM(str(model.directory), **OPTIONS, language_model_only=True) as llm:
        assert_vectors_close(
            embedded(llm, TEXTS, RAW), [model.vector(each) for each in TEXTS], TOLERANCE
        )
        with pytest.raises(RequestError, match="takes no images"):
            llm.embed(prompt_of(GIVEN[1]), use_tqdm=False)


@pytest.mark.slow
def test_padding_is_where_the_tokenizer_says(models: Models, tmp_path: Path) -> None:
    model = make_image_text_model("siglip", tmp_path)
    rewrite = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<bos>"}
    for side, wanted in {
        "left": [0] * 19 + [4, 5, 6, 7, 1],
        "right": [4, 5, 6, 7, 1] + [0] * 19,
    }.items():
        named = rewrite | {"padding_side": side}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
        assert model.token_ids("2 3 4 5") == wanted
        with LLM(str(tmp_path), **OPTIONS) as llm:
            (output,) = llm.embed("2 3 4 5", use_tqdm=False)
            assert output.prompt_token_ids == wanted
            assert_vectors_close(
                embedded(llm, ["2 3 4 5"], RAW), [model.vector("2 3 4 5")], TOLERANCE
            )


def test_what_makes_no_vectors_is_refused(models: Models, tmp_path: Path) -> None:
    model = make_image_text_model("siglip", tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    for change, message in (
        ({"vision_use_head": False}, "vision_use_head false is not supported"),
        ({"hidden_size": 32}, r"hidden_size \(32\) must be that of the vectors of texts"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
        ({"model_type": "clip_vision_model"}, "model_type 'clip_vision_model' is not supported"),
    ):
        rewrite_config(tmp_path, vision_config=vision | change)
        with pytest.raises(EngineStartError, match=message):
            LLM(str(model.directory), **OPTIONS)
