"""InternVL as its authors publish it: transformers' tokens, and the bits of transformers' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.image_llms import prepared_of
from support.published_internvl import publish
from support.variants import slow
from support.vision_models import make_vision_model, reference_tokens

from shmllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"max_model_len": 512, "num_threads": 1, "multiprocess": False}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
OF_6B = {"norm_type": "rms_norm", "attention_bias": False}
OF_300M = {"use_qk_norm": False}


def pictures() -> list[Any]:
    draw = np.random.default_rng(1)
    return [
        Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8))
        for size in ((90, 130), (140, 70), (64, 64))
    ]


def generate(llm: LLM, mark: str) -> list[Any]:
    prompts = [
        {"prompt": f"See {mark} now", "multi_modal_data": {"image": [each]}} for each in pictures()
    ]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("vision", "text"), [(OF_6B, "llama"), slow(OF_300M, "qwen2"), slow(OF_6B, "qwen2")]
)
def test_tokens_are_those_of_transformers(
    vision: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """InternLM 2 is Llama under other names."""
    directory = tmp_path / "model"
    model = make_vision_model("internvl", directory, vision=vision, model_type=text)
    with LLM(str(directory), **OPTIONS) as llm:
        others = generate(llm, "<IMG_CONTEXT>")
    publish(directory)
    with LLM(str(directory), **OPTIONS) as llm:
        outputs = generate(llm, "<image>")
        for output, other, picture in zip(outputs, others, pictures(), strict=True):
            assert output.prompt_token_ids == other.prompt_token_ids
            assert output.outputs[0].logprobs == other.outputs[0].logprobs
            prepared = prepared_of(llm, [picture])
            wanted = reference_tokens(model, output.prompt_token_ids, prepared, 12)
            assert list(output.outputs[0].token_ids) == wanted
        content = [{"type": "image_pil", "image_pil": pictures()[0]}, {"type": "text", "text": "?"}]
        (chat,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
        assert chat.prompt_token_ids.count(model.config.image_token_id) == (
            outputs[0].prompt_token_ids.count(model.config.image_token_id)
        )
        assert llm.front_end.items.mark("image") == "<image>"
