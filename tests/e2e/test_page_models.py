"""Models that read pages, with files as their authors publish them: prompts of chats are those of
transformers' processors, and tokens those of its models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.image_llms import prepared_of
from support.published_deepseek import publish as publish_deepseek
from support.torchvision_modules import without_videos
from support.variants import slow
from support.vision_models import TWO_SIZES, image_processor, make_vision_model, reference_tokens
from transformers import PreTrainedTokenizerFast
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.granite_docling.processing_granite_docling import (
    GraniteDoclingProcessor,
)
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from shmllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_threads": 1, "multiprocess": False}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAGES = [(60, 101), (130, 90)]


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def publish_paddleocr_vl(directory: Path) -> None:
    """All fields are in one object, and weights that no model has beside the others."""
    values = read(directory / "config.json")
    text = values.pop("text_config")
    values["vision_config"]["model_type"] = "paddleocr_vl"
    values["rope_scaling"] = text.pop("rope_parameters")
    values["rope_theta"] = values["rope_scaling"].pop("rope_theta")
    flat = text | values | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(flat))
    encoder = "visual.vision_model"
    others = "head.probe", "head.mlp.fc1.weight", "embeddings.packing_position_embedding.weight"
    tensors = load_file(directory / "model.safetensors")
    assert "mlp_AR.linear_1.weight" in tensors
    tensors |= {f"{encoder}.{name}": torch.ones(2, 2) for name in others}
    save_file(tensors, directory / "model.safetensors")


def publish_lighton_ocr(directory: Path) -> None:
    """Names are Mistral 3's, and one file has the processor and the image processor."""
    values = read(directory / "config.json")
    other = {"architectures": ["LightOnOCRForConditionalGeneration"], "model_type": "mistral3"}
    other |= {"projector_hidden_act": "gelu", "multimodal_projector_bias": False}
    (directory / "config.json").write_text(json.dumps(values | other))
    images = directory / "preprocessor_config.json"
    whole = {"image_processor": read(images), "patch_size": 14, "spatial_merge_size": 2}
    (directory / "processor_config.json").write_text(json.dumps(whole))
    images.unlink()


def publish_glm_ocr(directory: Path) -> None:
    """A layer that predicts further tokens is behind the others."""
    values = read(directory / "config.json")
    values["text_config"]["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(values))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.language_model.layers.3.enorm.weight"] = torch.ones(64)
    save_file(tensors, directory / "model.safetensors")


def publish_qianfan_ocr(directory: Path) -> None:
    """Layers of the language model do not have the names that transformers 5.24 writes."""
    tensors = load_file(directory / "model.safetensors")
    other = "language_model.model.encoder.layers.", "language_model.model.layers."
    renamed = {name.replace(*other): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, directory / "model.safetensors")


def publish_granite_docling(directory: Path) -> None:
    """Heads that predict further tokens are beside the others."""
    tensors = load_file(directory / "model.safetensors")
    assert "model.density_router.att.weight" in tensors
    tensors["mtp.layers.0.norm.weight"] = torch.ones(64)
    save_file(tensors, directory / "model.safetensors")


class Kind(NamedTuple):
    """
    Attributes:
        publish: brings a directory into the form of the authors.
        processor: transformers' class.
        names: the names that the tokenizer gives to special tokens.
        image, before, behind: what the template has for an image, and around a message.
        instruction: what the model is asked.
    """

    publish: Callable[[Path], None]
    processor: Any
    names: dict[str, str]
    image: str
    before: str
    behind: str
    instruction: str


KINDS = {
    "paddleocr_vl": Kind(
        publish_paddleocr_vl,
        PaddleOCRVLProcessor,
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "<|begin_of_sentence|>User: {{ '' }}",
        "\\nAssistant:\\n",
        "OCR:",
    ),
    "lighton_ocr": Kind(
        publish_lighton_ocr,
        LightOnOcrProcessor,
        {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_start|>",
            "image_end_token": "<|vision_end|>",
        },
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_start|>user{{ '\\n' }}",
        "<|im_end|>\\n<|im_start|>assistant\\n",
        "",
    ),
    "glm_ocr": Kind(
        publish_glm_ocr,
        without_videos(Glm46VProcessor),
        {},
        "<|begin_of_image|><|image|><|end_of_image|>",
        "[gMASK]<sop><|user|>{{ '\\n' }}",
        "<|assistant|>\\n",
        "Text Recognition:",
    ),
    "qianfan_ocr": Kind(
        publish_qianfan_ocr,
        partial(QianfanOCRProcessor, image_seq_length=4),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        "<image>\\n",
        "<|im_start|>user{{ '\\n' }}",
        "<|im_end|>\\n<|im_start|>assistant\\n",
        "Parse this document to Markdown.",
    ),
    "deepseek_ocr2": Kind(
        publish_deepseek,  # transformers writes the authors' names
        partial(DeepseekOcr2Processor, patch_size=2),
        {},
        "<image>\\n",
        "",
        "",
        "Free OCR.",
    ),
    "granite_docling": Kind(
        publish_granite_docling,
        partial(GraniteDoclingProcessor, image_seq_len=4),
        {},
        "<image>",
        "<|im_start|>user{{ ':' }}",
        "<|im_end|>\\n<|im_start|>assistant:",
        "<doclang>",
    ),
}


def processor_of(name: str, directory: Path) -> Any:
    """transformers' processor, with the template of the family's chats."""
    kind = KINDS[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), extra_special_tokens=kind.names
    )
    parts = (image_processor(name), tokenizer, *([None] if name == "glm_ocr" else []))
    template = (
        f"{kind.before}{{%- for message in messages %}}"
        '{%- for part in message["content"] %}'
        f'{{%- if part["type"] == "image" %}}{kind.image}'
        '{%- elif part["type"] == "text" %}{{ part["text"] }}{%- endif %}{%- endfor %}'
        f'{{%- endfor %}}{{{{ "{kind.behind}" }}}}'
    )
    return kind.processor(*parts, chat_template=template)


@pytest.mark.parametrize("name", [name if name == "paddleocr_vl" else slow(name) for name in KINDS])
def test_chats_with_pages_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = make_vision_model(name, directory)
    KINDS[name].publish(directory)
    theirs = processor_of(name, directory)
    tokenizer = read(directory / "tokenizer_config.json")
    tokenizer |= {"chat_template": theirs.chat_template, **KINDS[name].names}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    draw = np.random.default_rng(1)
    pages = [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in PAGES]
    longest = {"max_model_len": 2048} if name in TWO_SIZES else {}
    with LLM(str(directory), **OPTIONS | longest) as llm:
        for page in pages:
            content: list[dict[str, Any]] = [{"type": "image", "image": page}]
            if text := KINDS[name].instruction:
                content.append({"type": "text", "text": text})
            messages: list[Any] = [{"role": "user", "content": content}]
            (output,) = llm.chat(messages, PARAMS, use_tqdm=False)
            expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)
            assert list(output.prompt_token_ids) == list(map(int, expected["input_ids"][0]))
            wanted = reference_tokens(model, output.prompt_token_ids, prepared_of(llm, [page]), 12)
            assert list(output.outputs[0].token_ids) == wanted
