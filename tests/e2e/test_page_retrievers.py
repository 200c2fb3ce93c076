"""Retrievers of pages: vectors of the tokens of pages and questions are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.image_llms import prepared_of
from support.model_helpers import load
from support.one_thread import one_thread
from support.variants import slow
from support.vision_families import FAMILIES
from support.vision_models import draw_weights, pixel_inputs, tokenizer_with, write_settings
from torch import Tensor
from transformers import ColQwen2Config, ColQwen2ForRetrieval, Qwen2VLConfig

from shmllm import LLM, EngineStartError
from shmllm.models.config import ModelConfig

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_threads": 1, "multiprocess": False}
PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
"""The prompt of a page, as transformers' `ColQwen2Processor` writes it."""
QUESTION = "Query: When was it signed?" + "<|endoftext|>" * 10 + "\n"
"""The prompt of a question, likewise."""


class Retriever(NamedTuple):
    """A model of transformers', and its directory."""

    model: Any
    directory: Path


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return make_retriever(tmp_path_factory.mktemp("colqwen2"))


def make_retriever(directory: Path) -> Retriever:
    family = FAMILIES["qwen2_vl"]
    family = family._replace(marks=(*family.marks, "<|endoftext|>"))
    tokenizer = tokenizer_with(family.marks)
    ids = {name: tokenizer.token_to_id(mark) for name, mark in family.ids.items()}
    torch.manual_seed(7)
    whole = Qwen2VLConfig(text_config=family.text, vision_config=family.vision, **ids)
    model = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=whole, embedding_dim=24)).eval()
    draw_weights(model, 1.0)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_settings("qwen2_vl", directory)
    return Retriever(model, directory)


def pages(*sizes: tuple[int, int]) -> list[Image.Image]:
    draw = np.random.default_rng(3)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def with_page(page: Image.Image) -> Any:
    return {"prompt": PAGE, "multi_modal_data": {"image": page}}


@one_thread()
@torch.inference_mode()
def wanted(model: Any, llm: LLM, token_ids: Any, page: Image.Image | None) -> Tensor:
    """transformers' vectors, [tokens, width]. Version 5.24 lets positions count on through images
    unless it gets others; the model was trained with triples, as in the authors' code."""
    ids = torch.tensor([list(token_ids)])
    inputs: dict[str, Tensor] = {}
    if page is not None:
        (item,) = prepared_of(llm, [page])
        inputs = pixel_inputs("qwen2_vl", item.data, item.grid)
        is_image = (ids == model.config.vlm_config.image_token_id).long()
        inputs["position_ids"], _ = model.vlm.get_rope_index(
            ids, image_grid_thw=inputs["image_grid_thw"], mm_token_type_ids=is_image
        )
        inputs["pixel_values"] = inputs["pixel_values"][None]
    found: Tensor = model(ids, attention_mask=torch.ones_like(ids), **inputs).embeddings[0]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        *map(slow, ({"max_num_batched_tokens": 40, "enable_prefix_caching": False},)),
        *map(slow, ({"block_size": 16, "num_gpu_blocks_override": 9, "max_model_len": 96},)),
    ],
)
def test_vectors_are_those_of_transformers(options: dict[str, Any], retriever: Retriever) -> None:
    images = [*pages((90, 130), (140, 60)), None]
    with LLM(str(retriever.directory), **OPTIONS | options) as llm:
        pooling = llm.facts.pooling
        assert (pooling.task, pooling.normalize, pooling.embedding_size) == (
            *("token_embed", True, 24),
        )
        prompts = [QUESTION if page is None else with_page(page) for page in images]
        outputs = llm.encode([*prompts, *prompts], use_tqdm=False)
        for output, again, page in zip(outputs[:3], outputs[3:], images, strict=True):
            expected = wanted(retriever.model, llm, output.prompt_token_ids, page)
            found = output.outputs.data
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < 1e-5
            assert torch.equal(found, again.outputs.data)


def test_scores_are_sums_of_the_largest_products(retriever: Retriever) -> None:
    images = pages((90, 130), (60, 140))
    with LLM(str(retriever.directory), **OPTIONS) as llm:
        prompts = [with_page(page) for page in images]
        scores = [each.outputs.score for each in llm.score(QUESTION, prompts, use_tqdm=False)]
        question, *documents = (each.outputs.data for each in llm.encode([QUESTION, *prompts]))
        expected = [float((question @ page.T).amax(1).sum()) for page in documents]
        assert scores == pytest.approx(expected, rel=1e-5)
        assert scores[0] != pytest.approx(scores[1], rel=1e-3)
        (whole,) = llm.embed(prompts[0], use_tqdm=False)
        assert len(whole.outputs.embedding) == 24


@pytest.mark.parametrize(
    ("name", "before"),
    [("vlm.", "vlm.model."), slow("vlm.language_model.", "vlm.model.")],
)
def test_older_files_have_other_names(
    name: str, before: str, retriever: Retriever, tmp_path: Path
) -> None:
    tensors = load_file(retriever.directory / "model.safetensors")
    whole = {each.replace(name, before, 1): tensor for each, tensor in tensors.items()}
    whole["vlm.lm_head.weight"] = torch.ones(512, 64)
    for path in retriever.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(whole, tmp_path / "model.safetensors")
    new, old = (load(each).named_weights() for each in (retriever.directory, tmp_path))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[each][0].clone(), old[each][0].clone()) for each in new)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("", {"embedding_dim": 0}, "'embedding_dim' must be an integer of at least 1"),
        ("", {"vlm_config": 3}, "'vlm_config' must be an object, not 3"),
        ("vlm_config", {"text_config": {"model_type": "qwen3"}}, "supported: qwen2_vl_text"),
        ("vlm_config", {"vision_config": {"model_type": "clip"}}, "supported: qwen2_vl_vision"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str, fields: dict[str, Any], message: str, retriever: Retriever, tmp_path: Path
) -> None:
    values = json.loads((retriever.directory / "config.json").read_text())
    (values[part] if part else values).update(fields)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_the_width_that_files_leave_out_is_that_of_transformers(
    retriever: Retriever, tmp_path: Path
) -> None:
    values = json.loads((retriever.directory / "config.json").read_text())
    del values["embedding_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path)
    assert config.head is not None
    assert config.head.width == ColQwen2Config().embedding_dim
    assert config.vision is not None
    assert (config.vision.has_axes, config.vision.video) == (True, None)
