"""Retrievers of pages: vectors of the tokens of pages and questions are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
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
from support.vision_families import FAMILIES, SIGLIP, VISION
from support.vision_models import draw_weights, pixel_inputs, tokenizer_with, write_settings
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    ColModernVBertConfig,
    ColModernVBertForRetrieval,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ModernVBertConfig,
    PaliGemmaConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from shmllm import LLM, EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.registry import Purpose, purpose_of

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_threads": 1, "multiprocess": False}
PAGES = {
    "colqwen2": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
    "<|im_end|><|endoftext|>",
    "colmodernvbert": "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\n"
    "Assistant:",
    "colpali": "Describe the image.",
    **dict.fromkeys(
        ("colqwen3", "colqwen3_5"),
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe it.<|im_end|>",
    ),
}
"""The prompt of a page, as transformers' processors write it."""
END = {
    "colqwen2": "<|endoftext|>",
    "colmodernvbert": "<end_of_utterance>",
    "colpali": "<pad>",
    **dict.fromkeys(("colqwen3", "colqwen3_5"), "<|endoftext|>"),
}
FAMILY = {
    "colqwen2": "qwen2_vl",
    "colmodernvbert": "idefics3",
    "colpali": "paligemma",
    "colqwen3": "qwen3_vl",
    "colqwen3_5": "qwen3_5",
}
"""The recipe of the part that reads prompts; that of ColModernVBERT has another language model."""
ARCHITECTURE = {
    "colqwen2": "ColQwen2ForRetrieval",
    "colmodernvbert": "ColModernVBertForRetrieval",
    "colpali": "ColPaliForRetrieval",
    "colqwen3": "ColQwen3",
    "colqwen3_5": "ColQwen3_5",
}
MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "local_attention": 8,
    **{f"{name}_token_id": 440 for name in ("pad", "bos", "eos", "cls", "sep")},
}


class Projected(torch.nn.Module):
    """A model of transformers and a projection of each token, which transformers has no class for.

    Args:
        name: the model_type that its files have.
        whole: the model.
        config: of the model.
    """

    def __init__(self, name: str, whole: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.vlm, self.config, self._name = whole, config, name
        self.custom_text_proj = torch.nn.Linear(config.text_config.hidden_size, 24)

    def forward(self, ids: Tensor, **inputs: Tensor) -> Any:
        is_image = (ids == self.config.image_token_id).long()
        states = self.vlm.model(ids, mm_token_type_ids=is_image, **inputs).last_hidden_state
        found = torch.nn.functional.normalize(self.custom_text_proj(states), dim=-1)
        return SimpleNamespace(embeddings=found)

    def save_pretrained(self, directory: Path) -> None:
        tensors = {name: each.contiguous() for name, each in self.state_dict().items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        values = self.config.to_dict() | {
            "architectures": [ARCHITECTURE[self._name]],
            "model_type": self._name,
            "dims": 24,
        }
        (directory / "config.json").write_text(json.dumps(values))


class Retriever(NamedTuple):
    """A model of transformers', and its directory."""

    name: str
    model: Any
    directory: Path

    @property
    def question(self) -> str:
        """The prompt of a question, as transformers' processors write it."""
        begin = "<bos>Question: " if self.name == "colpali" else "Query: "
        return f"{begin}When was it signed?{END[self.name] * 10}\n"

    def with_page(self, page: Image.Image) -> Any:
        return {"prompt": PAGES[self.name], "multi_modal_data": {"image": page}}


@pytest.fixture(scope="module", params=FAMILY)
def retriever(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Retriever:
    return make_retriever(request.param, tmp_path_factory.mktemp(request.param))


def make_retriever(name: str, directory: Path) -> Retriever:
    family = FAMILIES[FAMILY[name]]
    tokenizer = tokenizer_with((*family.marks, END[name]))
    ids = {field: tokenizer.token_to_id(mark) for field, mark in family.ids.items()}
    torch.manual_seed(7)
    if name == "colqwen2":
        whole: Any = Qwen2VLConfig(text_config=family.text, vision_config=family.vision, **ids)
        config: Any = ColQwen2Config(vlm_config=whole, embedding_dim=24)
        model: Any = ColQwen2ForRetrieval(config).eval()
    elif name in ("colqwen3", "colqwen3_5"):
        kind = {"colqwen3": Qwen3VLConfig, "colqwen3_5": Qwen3_5Config}[name]
        config = kind(text_config=family.text, vision_config=family.vision, **ids)
        model = Projected(name, AutoModelForImageTextToText.from_config(config), config).eval()
    elif name == "colpali":
        whole = PaliGemmaConfig(
            text_config=family.text, vision_config=family.vision, **family.outer, **ids
        )
        config = ColPaliConfig(vlm_config=whole, embedding_dim=24)
        model = ColPaliForRetrieval(config).eval()
    else:
        vision = VISION | SIGLIP
        whole = ModernVBertConfig(
            text_config=MODERNBERT, vision_config=vision, pixel_shuffle_factor=2, **ids
        )
        config = ColModernVBertConfig(vlm_config=whole, embedding_dim=24)
        model = ColModernVBertForRetrieval(config).eval()
    draw_weights(model, 0.0 if name in ("colpali", "colqwen3_5") else 1.0)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_settings(FAMILY[name], directory)
    return Retriever(name, model, directory)


def pages(*sizes: tuple[int, int]) -> list[Image.Image]:
    draw = np.random.default_rng(3)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


@one_thread()
@torch.inference_mode()
def wanted(retriever: Retriever, llm: LLM, token_ids: Any, page: Image.Image | None) -> Tensor:
    """transformers' vectors, [tokens, width]. For ColQwen2, version 5.24 lets positions count on
    through images unless it gets others; the model was trained with triples, as in the authors'
    code."""
    ids, model = torch.tensor([list(token_ids)]), retriever.model
    inputs: dict[str, Tensor] = {}
    if retriever.name == "colpali":  # whose processor says that all tokens belong to a prompt
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if page is not None:
        (item,) = prepared_of(llm, [page])
        inputs |= pixel_inputs(FAMILY[retriever.name], item.data, item.grid)
    if page is not None and retriever.name == "colqwen2":
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
        *map(slow, ({"block_size": 16, "num_gpu_blocks_override": 18, "max_model_len": 128},)),
    ],
)
def test_vectors_are_those_of_transformers(options: dict[str, Any], retriever: Retriever) -> None:
    images = [*pages((90, 130), (140, 60)), None]
    with LLM(str(retriever.directory), **OPTIONS | options) as llm:
        pooling = llm.facts.pooling
        assert (pooling.task, pooling.normalize, pooling.embedding_size) == (
            *("token_embed", True, 24),
        )
        prompts = [
            retriever.question if page is None else retriever.with_page(page) for page in images
        ]
        outputs = llm.encode([*prompts, *prompts], use_tqdm=False)
        for output, again, page in zip(outputs[:3], outputs[3:], images, strict=True):
            expected = wanted(retriever, llm, output.prompt_token_ids, page)
            found = output.outputs.data
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < 1e-5
            assert torch.equal(found, again.outputs.data)


def test_scores_are_sums_of_the_largest_products(retriever: Retriever) -> None:
    images = pages((90, 130), (60, 140))
    with LLM(str(retriever.directory), **OPTIONS) as llm:
        prompts = [retriever.with_page(page) for page in images]
        asked = retriever.question
        scores = [each.outputs.score for each in llm.score(asked, prompts, use_tqdm=False)]
        question, *documents = (each.outputs.data for each in llm.encode([asked, *prompts]))
        expected = [float((question @ page.T).amax(1).sum()) for page in documents]
        assert scores == pytest.approx(expected, rel=1e-5)
        assert scores[0] != pytest.approx(scores[1], rel=1e-3)
        (whole,) = llm.embed(prompts[0], use_tqdm=False)
        assert len(whole.outputs.embedding) == 24


@pytest.fixture(scope="module")
def colqwen2(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return make_retriever("colqwen2", tmp_path_factory.mktemp("colqwen2"))


@pytest.mark.parametrize(
    ("name", "before"),
    [("vlm.", "vlm.model."), slow("vlm.language_model.", "vlm.model.")],
)
def test_older_files_have_other_names(
    name: str, before: str, colqwen2: Retriever, tmp_path: Path
) -> None:
    tensors = load_file(colqwen2.directory / "model.safetensors")
    whole = {each.replace(name, before, 1): tensor for each, tensor in tensors.items()}
    whole["vlm.lm_head.weight"] = torch.ones(512, 64)
    for path in colqwen2.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(whole, tmp_path / "model.safetensors")
    new, old = (load(each).named_weights() for each in (colqwen2.directory, tmp_path))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[each][0].clone(), old[each][0].clone()) for each in new)


@pytest.mark.parametrize(
    ("name", "part", "fields", "message"),
    [
        ("colqwen2", "", {"embedding_dim": 0}, "'embedding_dim' must be an integer of at least 1"),
        ("colqwen2", "", {"vlm_config": 3}, "'vlm_config' must be an object, not 3"),
        ("colqwen2", "text_config", {"model_type": "qwen3"}, "supported: qwen2_vl_text"),
        ("colqwen2", "vision_config", {"model_type": "clip"}, "supported: qwen2_vl_vision"),
        ("colmodernvbert", "text_config", {"model_type": "bert"}, "supported: modernbert"),
        ("colmodernvbert", "vision_config", {"model_type": "clip"}, "supported: siglip_vision_m"),
        ("colmodernvbert", "vlm_config", {"pixel_shuffle_factor": 3}, r"\(3\) must divide the 4"),
        ("colmodernvbert", "vlm_config", {"image_token_id": 512}, "is no token of a vocabulary"),
        ("colpali", "text_config", {"model_type": "gemma3"}, "supported: gemma, gemma2"),
        ("colpali", "vision_config", {"model_type": "clip"}, "supported: siglip_vision_model"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"architectures": [ARCHITECTURE[name]]}
    family = FAMILIES[FAMILY[name]]
    is_own = name == "colmodernvbert"
    text, vision = (MODERNBERT, VISION) if is_own else (family.text, family.vision)
    values["vlm_config"] = inner = {"text_config": dict(text), "vision_config": dict(vision)}
    inner["image_token_id"] = 442
    inner["pixel_shuffle_factor"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    ModelConfig.from_directory(tmp_path)
    place = values if not part else inner if part == "vlm_config" else inner[part]
    place.update(fields)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_the_width_that_files_leave_out_is_that_of_transformers(
    colqwen2: Retriever, tmp_path: Path
) -> None:
    values = json.loads((colqwen2.directory / "config.json").read_text())
    del values["embedding_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path)
    assert config.head is not None
    assert config.head.width == ColQwen2Config().embedding_dim
    assert config.vision is not None
    assert (config.vision.has_axes, config.vision.video) == (True, None)


@pytest.mark.parametrize(
    ("name", "model_class", "fields", "width"),
    [
        ("colqwen3", "ColQwen3", {"embed_dim": 320}, 320),
        ("colqwen3", "OpsColQwen3Model", {"dims": 48, "embed_dim": None}, 48),
        ("colqwen3", "Qwen3VLNemotronEmbedModel", {}, None),
        ("colqwen3_5", "ColQwen3_5", {"projection_dim": 64}, 64),
        ("colqwen3_5", "ColQwen3_5", {}, 128),
    ],
)
def test_the_width_has_many_names(
    name: str, model_class: str, fields: dict[str, Any], width: int | None, tmp_path: Path
) -> None:
    family = FAMILIES[FAMILY[name]]
    parts = {"text_config": family.text, "vision_config": family.vision, "image_token_id": 442}
    values = {"architectures": [model_class], **parts, **fields}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path)
    assert (config.head and config.head.width) == width
    assert purpose_of(config.architecture) is Purpose.EMBED_TOKENS


def test_a_projection_may_have_another_name_and_no_bias(tmp_path: Path) -> None:
    whole, plain = tmp_path / "whole", tmp_path / "plain"
    for each in (whole, plain):
        each.mkdir()
    retriever = make_retriever("colqwen3", whole)
    torch.nn.init.zeros_(retriever.model.custom_text_proj.bias)
    retriever.model.save_pretrained(whole)
    tensors = load_file(whole / "model.safetensors")
    del tensors["custom_text_proj.bias"]
    tensors["embedding_proj_layer.weight"] = tensors.pop("custom_text_proj.weight")
    (plain / "config.json").write_bytes((whole / "config.json").read_bytes())
    save_file(tensors, plain / "model.safetensors")
    first, second = (load(each).named_weights() for each in (whole, plain))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[each][0].clone(), second[each][0].clone()) for each in first)
