"""Models that see images from two GGUF files: their tokens are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.gguf_towers import write_pair
from support.image_llms import prepared_of
from support.variants import slow
from support.vision_models import make_vision_model, reference_tokens

from shmllm import LLM, RequestError, SamplingParams
from shmllm.cli.models import takes
from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import check_source
from shmllm.formats.gguf_projectors import projectors_beside
from shmllm.frontend.model_files import gguf_files, resolve_model
from shmllm.frontend.model_listing import describe_models

OPTIONS: dict[str, Any] = {"max_model_len": 256, "dtype": "float32"}
SLIDING = "sliding_attention"  # as llama.cpp takes the first layers of each six
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": [SLIDING] * 3},
    "qwen3_vl_moe": {"mlp_only_layers": []},
}
"""What files of text models cannot say otherwise."""
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def picture() -> Any:
    noise = np.random.default_rng(5).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def prompt_of(llm: LLM) -> Any:
    text = f"See {llm.front_end.items.mark('image')} now?"
    return {"prompt": text, "multi_modal_data": {"image": [picture()]}}


def pair(tmp_path: Path, **options: Any) -> Path:
    """The file of a text model, with that of its tower beside it."""
    model = make_vision_model("gemma3", tmp_path / "model", **TEXTS["gemma3"])
    return write_pair("gemma3", model, tmp_path / "model", tmp_path / "gguf", **options)


@pytest.mark.parametrize(
    ("name", "swaps"),
    [
        ("gemma3", False),
        ("qwen3_vl", False),
        slow("gemma3", True),
        slow("smolvlm", False),
        slow("mistral3", False),
        slow("qwen3_vl_moe", False),
        slow("qwen3_5", False),
        slow("qwen2_vl", False),
        slow("qwen2_vl", True),
        slow("qwen2_5_vl", False),
    ],
)
def test_greedy_tokens_are_those_of_transformers(name: str, swaps: bool, tmp_path: Path) -> None:
    model = make_vision_model(name, tmp_path / "model", **TEXTS.get(name, {}))
    file = write_pair(name, model, tmp_path / "model", tmp_path / "gguf", swaps=swaps)
    with LLM(str(file), **OPTIONS) as llm:
        [output] = llm.generate([prompt_of(llm)], PARAMS, use_tqdm=False)
        prepared = prepared_of(llm, [picture()])
        wanted = reference_tokens(model, output.prompt_token_ids, prepared, 12)
        assert list(output.outputs[0].token_ids) == wanted
        chat = [{"type": "image_pil", "image_pil": picture()}, {"type": "text", "text": "What?"}]
        [reply] = llm.chat([{"role": "user", "content": chat}], PARAMS, use_tqdm=False)
        assert reply.error is None
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        prepared_there = prepared_of(llm, [picture()])
        [there] = llm.generate([prompt_of(llm)], PARAMS, use_tqdm=False)
        [reply_there] = llm.chat([{"role": "user", "content": chat}], PARAMS, use_tqdm=False)
    for one, other in zip(prepared, prepared_there, strict=True):
        assert np.array_equal(one.data, other.data)
    assert output.prompt_token_ids == there.prompt_token_ids
    assert reply.prompt_token_ids == reply_there.prompt_token_ids
    assert reply.outputs[0].token_ids == reply_there.outputs[0].token_ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clip.projector_type": "other"}, "the tower 'other' is not supported; supported: gemma3"),
        (
            {"clip.vision.projection_dim": 96},
            "embeddings of 96 numbers, those of the model have 64",
        ),
        ({"clip.vision.image_size": 0}, "image_size must be a positive whole number, found 0"),
        ({"clip.vision.image_mean": [0.5]}, "image_mean must have a number for each colour"),
        ({"clip.vision.attention.layer_norm_epsilon": -1.0}, "must be a positive number"),
    ],
)
def test_a_tower_that_cannot_be_used_leaves_the_text_model(
    change: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = pair(tmp_path, change=change)
    with LLM(str(file), **OPTIONS) as llm:
        assert reason in caplog.text
        assert "model.gguf sees no images" in caplog.text
        [output] = llm.generate(["only text"], PARAMS, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12
        with pytest.raises((RequestError, ValueError), match="image"):
            llm.generate(
                [{"prompt": "text", "multi_modal_data": {"image": [picture()]}}], use_tqdm=False
            )


def test_a_missing_token_of_images_leaves_the_text_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = pair(tmp_path, renamed={"<image_soft_token>": "<other>"})
    assert not (resolve_model(str(file)) / "preprocessor_config.json").exists()
    assert "no token <image_soft_token>, which stands for an image" in caplog.text


def test_a_directory_with_a_model_and_its_tower_is_that_model(tmp_path: Path) -> None:
    file = pair(tmp_path)
    assert resolve_model(str(file.parent)) == resolve_model(str(file))
    assert gguf_files(file.parent) == [file]


def test_the_list_of_models_says_that_it_takes_images(tmp_path: Path) -> None:
    file = pair(tmp_path)
    for name in (file, file.parent):
        [record] = describe_models(str(name))
        assert takes(record) == ("image",)
    file.with_name("mmproj-F16.gguf").unlink()
    [record] = describe_models(str(file))
    assert takes(record) == ()


def test_a_tower_alone_is_no_model(tmp_path: Path) -> None:
    file = pair(tmp_path)
    with pytest.raises(EngineStartError, match=r"mmproj-F16\.gguf: it has a tower of images"):
        resolve_model(str(file.with_name("mmproj-F16.gguf")))
    file.unlink()
    with pytest.raises(EngineStartError, match="no model: looked for"):
        LLM(str(file.parent), **OPTIONS)


@pytest.mark.parametrize(
    "names",
    [
        ["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"],
        ["model-mmproj-bf16.gguf", "MMPROJ-F32.gguf", "a-mmproj.gguf", "mmproj.gguf"],
        [],
    ],
)
def test_of_several_towers_that_in_float16_comes_first(names: list[str], tmp_path: Path) -> None:
    for name in (*names, "model-F16.gguf"):
        (tmp_path / name).touch()
    found = projectors_beside(tmp_path / "model-F16.gguf")
    assert [path.name for path in found] == names


def test_towers_of_other_models_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = pair(tmp_path, tower="mmproj-b.gguf")
    file.with_name("mmproj-a-f16.gguf").write_bytes(b"GGUF damaged")
    directory = resolve_model(str(file))
    assert (directory / "mmproj.gguf").resolve() == file.with_name("mmproj-b.gguf")
    assert "sees no images" not in caplog.text
    file.with_name("mmproj-a-f16.gguf").unlink()
    check_source(directory)  # what was not read may go


def test_a_tower_that_appears_or_changes_makes_another_directory(tmp_path: Path) -> None:
    file = pair(tmp_path)
    tower = file.with_name("mmproj-F16.gguf")
    with_tower = resolve_model(str(file))
    tower.rename(tmp_path / "away.gguf")
    without = resolve_model(str(file))
    assert with_tower != without
    assert "vision_config" not in (without / "config.json").read_text()
    with pytest.raises(EngineStartError, match=r"cannot read the weights in .*mmproj-F16\.gguf"):
        LLM(str(with_tower), **OPTIONS)
