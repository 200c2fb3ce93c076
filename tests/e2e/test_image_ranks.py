"""Prompts with images where several processes compute a model, and where tokens are drafted: the
tokens of one process, which are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from support.determinism import said
from support.image_llms import prepared_of
from support.variants import slow
from support.vision_models import make_vision_model, reference_tokens, silence_marks

from shmllm import LLM, EngineStartError, RequestOutput, SamplingParams
from shmllm.models.weight_names import tower_name

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_threads": 1,
    "multiprocess": False,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 3,
}
RANKS = BASE | {"tensor_parallel_size": 2, "num_threads": 2}
STAGES = BASE | {"pipeline_parallel_size": 2, "num_threads": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_hidden_layers": 6},
    "qwen3_vl_moe": {"num_hidden_layers": 6},
    "qwen3_omni_moe": {"num_hidden_layers": 6},
    "granite4_vision": {"num_hidden_layers": 14},
}
"""What models have beside their recipes, so that the first of two stages has all levels."""


class Subject(NamedTuple):
    """A model of transformers', and its directory."""

    model: Any
    directory: str


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Subject:
    directory: Path = tmp_path_factory.mktemp("models") / request.param
    made = make_vision_model(request.param, directory, **LAYERS.get(request.param, {}))
    return Subject(made, str(directory))


WITH_STATES = "lfm2_vl", "lfm3_vl"
"""Families that cannot draft."""


def families(*default: str, without: Sequence[str] = ()) -> pytest.MarkDecorator:
    names = (
        "llava",
        "llava_next",
        "llava_onevision",
        "granite4_vision",
        "internvl",
        "smolvlm",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3",
        "gemma4-large",
        "glm4v",
        "glm4v_moe",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen2_5_omni",
        "qwen3_omni_moe",
        "exaone4_5",
        "kimi_k25",
        "minicpmv4_6",
        "minicpmv4_7",
        "deepseek_vl2",
        "minicpm_ocr",
        "mistral3",
        "pixtral",
        "lighton_ocr",
        "glm_ocr",
        "paddleocr_vl",
        "dots_ocr",
        "ernie4_5_vl_moe",
        "got_ocr2",
        "granite_docling",
        "ovis2",
        "qianfan_ocr",
        "llama4",
        "lfm2_vl",
        "lfm3_vl",
        "hunyuan_vl",
        "video_llama_3",
        "minimax_m3",
        "aya_vision",
        "blip_2",
        "cohere2_vision",
    )
    marked = [name if name in default else slow(name) for name in names if name not in without]
    return pytest.mark.parametrize("subject", marked, indirect=True)


def prompts_of(llm: LLM) -> list[Any]:
    """Prompts with and without images, more than run at a time, some with the same images."""
    noise = np.random.default_rng(5).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    images = [Image.fromarray(noise), Image.new("RGB", (70, 140), "teal")]
    mark = llm.front_end.items.mark("image")

    def with_images(text: str, *numbers: int) -> dict[str, Any]:
        data = {"image": [images[number] for number in numbers]}
        return {"prompt": text.replace("#", mark), "multi_modal_data": data}

    return [
        with_images("See # now?", 0),
        "only text",
        with_images("Both # and # here", 0, 1),
        with_images("a long beginning " * 4 + "#", 1),
        "text behind images, of about as many tokens as others have with theirs " * 2,
        with_images("Both # and # here", 1, 0),
    ]


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts_of(llm), GREEDY, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(model: Any, llm: LLM, outputs: list[RequestOutput]) -> list[list[int]]:
    """transformers' tokens, from the pixels that the front end has made."""
    found = []
    for prompt, output in zip(prompts_of(llm), outputs, strict=True):
        images = prompt["multi_modal_data"]["image"] if isinstance(prompt, dict) else []
        prepared = prepared_of(llm, images)
        count = len(output.outputs[0].token_ids)
        found.append(reference_tokens(model, output.prompt_token_ids, prepared, count))
    return found


def tower_bytes(model: Any) -> int:
    """The memory of what only images need, in float32."""
    return sum(
        4 * weight.numel()
        for name, weight in model.named_parameters()
        if not any(part in name for part in ("language_model", "text_model", "lm_head"))
    )


@families("qwen3_vl")
def test_two_ranks_equal_transformers(subject: Subject) -> None:
    """Only rank 0 has memory for the tower."""
    with LLM(subject.directory, **RANKS) as llm:
        outputs = generate(llm)
        assert tokens_of(outputs) == expected(subject.model, llm, outputs)
        num_bytes, num_parameters = llm.facts.weight_bytes, llm.facts.num_parameters
    with LLM(subject.directory, **BASE) as llm:
        assert num_parameters == llm.facts.num_parameters
        assert num_bytes - llm.facts.weight_bytes < tower_bytes(subject.model) / 2


@families("gemma3")
def test_two_stages_have_the_bits_of_one_process(subject: Subject) -> None:
    with LLM(subject.directory, **BASE) as llm:
        outputs = generate(llm)
        assert tokens_of(outputs) == expected(subject.model, llm, outputs)
    with LLM(subject.directory, **STAGES) as llm:
        assert [said(each) for each in generate(llm)] == [said(each) for each in outputs]


@pytest.mark.parametrize("subject", ["qwen3_vl", "gemma3", "gemma4-large"], indirect=True)
@pytest.mark.slow
def test_ranks_and_stages_sleep_and_get_new_weights(subject: Subject) -> None:
    """Embeddings of an image are those of the weights that the tower has, in all processes."""
    other = deepcopy(subject.model)
    other.vision_family = subject.model.vision_family
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.flip(0))
    silence_marks(other)
    for options in (RANKS, STAGES):
        with LLM(subject.directory, **options) as llm:
            first = tokens_of(generate(llm))
            llm.sleep(level=1)
            llm.wake_up()
            assert tokens_of(generate(llm)) == first
            llm.sleep(level=2)
            llm.wake_up()
            llm.update_weights(other.state_dict())
            outputs = generate(llm)
            assert tokens_of(outputs) == expected(other, llm, outputs) != first
            name = next(name for name in other.state_dict() if "patch_embed" in name)
            (found,) = llm.collective_rpc("get_weight", args=(tower_name(name),))
            assert torch.equal(torch.as_tensor(found), other.state_dict()[name])
            llm.collective_rpc("reload_weights")
            assert tokens_of(generate(llm)) == first


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["qwen3_vl"], indirect=True)
def test_random_weights_of_ranks_are_those_of_one_process(subject: Subject) -> None:
    found = []
    for options in (BASE, RANKS):
        with LLM(subject.directory, **options, load_format="dummy") as llm:
            found.append(tokens_of(generate(llm)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_levels_behind_the_first_stage_are_refused(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    with pytest.raises(EngineStartError, match="reach into its first 3 layers, which the first"):
        LLM(str(tmp_path), **STAGES)
    with LLM(str(tmp_path), **STAGES, language_model_only=True) as llm:
        (output,) = llm.generate(["only text"], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {},
}
"""Ways to draft; the model drafts for itself, without its tower."""


@families("qwen3_vl", without=WITH_STATES)
@pytest.mark.parametrize("drafter", ["draft_model", slow("ngram")])
def test_drafts_change_no_tokens(subject: Subject, drafter: str, tmp_path: Path) -> None:
    """Those of requests with images are not drafted."""
    config = {"num_speculative_tokens": 3, "adaptive": False, **DRAFTERS[drafter]}
    if drafter == "draft_model":
        config["model"] = subject.directory
        # A model with states cannot draft.
        if subject.model.vision_family.startswith(("qwen3_5", "minicpm")):
            config["model"] = str(tmp_path)
            make_vision_model("qwen3_vl", tmp_path)
    with LLM(subject.directory, **BASE) as llm:
        wanted = [said(output) for output in generate(llm)]
    with LLM(subject.directory, **BASE, speculative_config=config) as llm:
        assert [said(output) for output in generate(llm)] == wanted
        assert llm.get_metrics()["draft_tokens"] > 0 or drafter == "ngram"
        with_images = [each for each in prompts_of(llm) if isinstance(each, dict)]
        before = llm.get_metrics()["draft_tokens"]
        llm.generate(with_images, GREEDY, use_tqdm=False)
        assert llm.get_metrics()["draft_tokens"] == before
