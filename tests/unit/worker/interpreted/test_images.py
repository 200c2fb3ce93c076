"""Images in a whole engine on the fake GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.gpu_engine import Engine, launches_of_a_step
from conformance.gpu_images import (
    ImagesConformance,
    Subject,
    TowersConformance,
    add,
    encoded,
    make_config,
    subject,
)
from PIL import Image
from support.fake_gpu import FakeGpu
from support.image_llms import prepared_of
from support.image_text_models import TEXTS, make_image_text_model, prompt_of, some_images
from support.pooling_models import assert_vectors_close
from support.variants import slow
from support.vision_models import make_vision_model, reference_embeddings, reference_tokens

from shmllm import LLM, PoolingParams, SamplingParams

__all__ = ["encoded", "subject"]

LAUNCHES_OF_DECODES = {
    *("copy ahead", "_unpack_step", "graph", "copy"),
    *("aten::index_copy_", "aten::index_select"),  # of block tables
}


class TestTowers(TowersConformance):
    pass


class TestImages(ImagesConformance):
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
    def test_decodes_behind_an_image_cost_no_copies(
        self, subject: Subject, gpu_device: FakeGpu, mode: str
    ) -> None:
        """Levels are added in each step: an addition for each in a step of one token."""
        engine = Engine(make_config(subject.directory, mode=mode), gpu_device)
        num_levels = engine.runner.model.config.num_levels
        add(engine, 0, subject.asked["one"], max_tokens=9)
        for _ in range(4):
            engine.step()
        launched = launches_of_a_step(engine, gpu_device)
        if mode != "NONE":
            assert set(launched) <= LAUNCHES_OF_DECODES
        elif num_levels:
            assert Counter(launched)["aten::add_"] == num_levels
        engine.run()


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_tokens_of_prompts_attend_to_all_of_the_prompt(
    kind: str,
    graphs: bool,
    tmp_path: Path,
) -> None:
    """PaliGemma's, with an image and without, beside requests that decode."""
    model = make_vision_model("paligemma", tmp_path, model_type=kind, num_hidden_layers=2)
    image = Image.fromarray(np.indices((70, 60)).sum(0).astype(np.uint8)).convert("RGB")
    prompts = [
        {"prompt": "what?", "multi_modal_data": {"image": image}},
        {"prompt": "only text, and more"},
        {"prompt": "<image> no", "multi_modal_data": {"image": image}},
    ]
    mode = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [2, 64]}
    options: dict[str, Any] = {
        "dtype": "float32", "multiprocess": False, "max_model_len": 64, "max_num_seqs": 2,
        "kv_cache_memory_bytes": 2**22,
        **({"compilation_config": mode} if graphs else {"enforce_eager": True}),
    }  # fmt: skip
    with LLM(str(tmp_path), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            images = [image] if "multi_modal_data" in prompt else []
            prepared = prepared_of(llm, images)
            wanted = reference_tokens(model, output.prompt_token_ids, prepared, 6)
            assert output.outputs[0].token_ids == wanted


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("clip", "NONE"), slow("clip", "FULL_AND_PIECEWISE"), slow("siglip", "PIECEWISE")],
)
def test_vectors_of_texts_and_images_equal_transformers(
    kind: str, mode: str, tmp_path: Path
) -> None:
    """Of texts and images that steps compute together, while the next step is prepared."""
    model = make_image_text_model(kind, tmp_path, text={"num_hidden_layers": 2})
    options: dict[str, Any] = {
        "dtype": "float32",
        "multiprocess": False,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": 2**22,
        "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [2, 24]},
    }
    with LLM(str(tmp_path), **options) as llm:
        assert llm.facts.device == "fake GPU"
        raw = PoolingParams(use_activation=False)
        given = [TEXTS[0], some_images()[1], TEXTS[1], some_images()[0]]
        prompts = [prompt_of(each) for each in given]
        found = llm.embed(prompts, pooling_params=raw, use_tqdm=False)
        wanted = [model.vector(each) for each in given]
        assert_vectors_close([each.outputs.array for each in found], wanted, 2e-5)


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["internvl", "qwen3_vl"])
def test_embeddings_take_the_place_of_images(name: str, tmp_path: Path) -> None:
    """Qwen3-VL's have further levels behind them."""
    model = make_vision_model(name, tmp_path)
    image = Image.fromarray(np.indices((40, 50)).sum(0).astype(np.uint8)).convert("RGB")
    options: dict[str, Any] = {
        "dtype": "float32", "multiprocess": False, "max_model_len": 128, "max_num_seqs": 2,
        "kv_cache_memory_bytes": 2**22, "enforce_eager": True, "enable_mm_embeds": True,
    }  # fmt: skip
    with LLM(str(tmp_path), **options) as llm:
        (prepared,) = prepared_of(llm, [image])
        rows = reference_embeddings(model, prepared.data, prepared.grid)
        data: Any = [rows]
        if name == "qwen3_vl":
            data = {"image_embeds": rows, "image_grid_thw": [prepared.grid]}
        mark = llm.front_end.items.mark("image")
        prompt = {"prompt": f"see {mark} now", "multi_modal_data": {"image": data}}
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        wanted = reference_tokens(model, output.prompt_token_ids, [prepared], 6)
        assert output.outputs[0].token_ids == wanted
