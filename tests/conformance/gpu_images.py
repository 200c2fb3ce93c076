"""The tests of images in a whole engine on a device, compared with transformers' greedy tokens.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU. transformers computes before, since
the fake GPU cannot run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_engine import Engine
from support.audio_models import (
    audio_inputs,
    gemma4_embeddings,
    make_audio_model,
    make_gemma4,
    make_omni,
)
from support.variants import slow
from support.vision_families import FAMILIES, IMAGE_SIZE, WHISPER
from support.vision_models import (
    ANY_SIZE,
    BESIDE_WHOLE,
    EACH_FAMILY,
    JOINED,
    TWO_SIZES,
    image_token,
    make_vision_model,
    reference_embeddings,
    reference_tokens,
    silence_marks,
)
from torch import Tensor

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.core.plan import Encode, StepPlan
from shmllm.params.items import Grid, Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method
from shmllm.worker import loading
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.memory import DeviceMemory
from shmllm.worker.gpu.program import auto_dtype, check_model
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.items import make_item_embeds
from shmllm.worker.loading import load_model

BLOCK_SIZE, COUNT = 8, 4
TOLERANCE = 2e-5
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
MADE: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "vision": {"out_hidden_size": 32},
        "outer": {"audio_config": WHISPER | {"n_window": 10, "output_dim": 32}},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_omni_moe": {
        "vision": {"out_hidden_size": 32, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        "outer": {
            "audio_config": WHISPER | {"downsample_hidden_size": 6, "output_dim": 32},
        },
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_vl": {
        "vision": {"out_hidden_size": 32, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_vl_moe": {
        "vision": {"out_hidden_size": 32, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "qwen3_5": {
        "vision": {"out_hidden_size": 32, "depth": 2},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minicpmv4_7": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "glm4v": {
        "vision": {"out_hidden_size": 32},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "glm4v_moe": {
        "vision": {"out_hidden_size": 32},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "glm_ocr": {
        "vision": {"out_hidden_size": 32},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "granite_docling": {
        "vision": {"out_hidden_size": 32},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "llava": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "paddleocr_vl": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "got_ocr2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "mistral3": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "muse_glimmer": {"num_attention_heads": 2, "num_key_value_heads": 1, **LAYERS},
    "pixtral": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "lighton_ocr": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "lfm2_vl": {"num_attention_heads": 2, "num_key_value_heads": 1, **CONVOLUTIONS},
    "hunyuan_vl": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "video_llama_3": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "minimax_m3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "index_n_heads": 1,
        "index_block_size": BLOCK_SIZE,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "dots_ocr": {
        "vision": {"hidden_size": 32},
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "ernie4_5_vl_moe": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "blip_2": {"num_attention_heads": 2, "word_embed_proj_dim": 32},
    "granite4_vision": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 5,
        "outer": {"deepstack_layer_map": [[2, 0]], "spatial_target_layers": [2, 4, 1, 3]},
    },
    "lfm3_vl": {"num_attention_heads": 2, "num_key_value_heads": 1, **CONVOLUTIONS},
    "gemma3": {"num_attention_heads": 2, "num_key_value_heads": 1, **LAYERS},
    "gemma4": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gemma4_unified": {"num_attention_heads": 2, "num_key_value_heads": 2, **LAYERS},
    "gemma4-large": {"num_attention_heads": 2, "num_key_value_heads": 2, **LAYERS},
}
"""Models by the names of their families: what differs from the recipes."""
SQUARE: Grid = (1, 1, 1)
GRIDS: dict[str, list[Grid]] = {
    "qwen2_5_omni": [(1, 4, 6), (1, 4, 2)],
    "qwen3_omni_moe": [(1, 4, 6), (1, 4, 2)],
    "qwen3_vl": [(1, 4, 6), (1, 4, 2)],
    "qwen3_vl_moe": [(1, 4, 6), (1, 4, 2)],
    "qwen3_5": [(1, 4, 6), (1, 4, 2)],
    "minicpmv4_7": [(1, 8, 12), (1, 8, 4)],
    "glm4v": [(1, 4, 6), (1, 4, 2)],
    "glm4v_moe": [(1, 4, 6), (1, 4, 2)],
    "glm_ocr": [(1, 4, 6), (1, 4, 2)],
    "paddleocr_vl": [(1, 4, 6), (1, 4, 2)],
    "mistral3": [(1, 4, 6), (1, 4, 2)],
    "pixtral": [(1, 2, 3), (1, 2, 1)],
    "muse_glimmer": [(1, 4, 6), (1, 4, 2)],
    "lighton_ocr": [(1, 4, 6), (1, 5, 3)],
    "lfm2_vl": [(1, 4, 6), (1, 4, 2)],
    "hunyuan_vl": [(1, 4, 6), (1, 4, 2)],
    "video_llama_3": [(1, 2, 3), (1, 2, 1)],
    "minimax_m3": [(1, 4, 6), (1, 4, 2)],
    "dots_ocr": [(1, 4, 6), (1, 4, 2)],
    "ernie4_5_vl_moe": [(1, 4, 6), (1, 4, 2)],
    "granite4_vision": [(3, 90, 64), (3, 90, 64)],
    "lfm3_vl": [(1, 4, 6), (1, 4, 2)],
    "gemma4": [(1, 4, 6), (1, 4, 2)],
    "gemma4_unified": [(1, 4, 6), (1, 4, 2)],
    "gemma4-large": [(1, 4, 6), (1, 4, 2)],
}
"""The shapes of two images; of other families, one tile each."""


class Asked(NamedTuple):
    """A request, and transformers' tokens for it."""

    prompt: list[int]
    items: tuple[Item, ...]
    wanted: list[int]


class Subject(NamedTuple):
    """A model of transformers'.

    Attributes:
        directory: where it is.
        asked: requests by name.
        other: other weights.
        wanted: transformers' tokens for the request "two" with those.
        num_groups: the number of groups of its layers.
        cuts_images: whether a step may have a part of an image.
    """

    directory: Path
    asked: dict[str, Asked]
    other: dict[str, Tensor]
    wanted: list[int]
    num_groups: int
    cuts_images: bool


def make_subject(name: str, directory: Path, **text: Any) -> Subject:
    """Make a model, with further fields of its ``text_config``, and requests with and without
    images."""
    model = make_vision_model(name, directory, **TEXT | MADE[name] | text)
    images = [
        make_image(name, grid, seed) for seed, grid in enumerate(GRIDS.get(name, [SQUARE] * 2))
    ]
    token = image_token(model)

    def ask(*parts: int | str) -> Asked:
        """Text of so many tokens, or an image by its name."""
        prompt: list[int] = []
        items = []
        for part in parts:
            if isinstance(part, int):
                first = len(prompt)
                prompt += [(7 * first + 11 * index + part) % 250 for index in range(part)]
                continue
            grid, pixels = images["ab".index(part)]
            count = vision_embeds(model, name, grid)
            spans = ((len(prompt), len(prompt) + count),)
            items.append(Item(sha256(pixels.tobytes()).digest(), spans, grid, pixels))
            prompt += [token] * count
        if "omni" in name:  # transformers finds images by the tokens around them
            for begin, end in (span for item in items for span in item.spans):
                prompt[begin - 1] = model.config.vision_start_token_id
                prompt[end] = model.config.vision_end_token_id
        wanted = reference_tokens(model, prompt, items, COUNT)
        return Asked(prompt, tuple(items), wanted)

    asked = {
        "one": ask(3, "a", 2),
        "text": ask(9),
        "two": ask(2, "b", 3, "a", 1),
        "short text": ask(1),
    }
    two = asked["two"]
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    silence_marks(model)
    wanted = reference_tokens(model, two.prompt, two.items, COUNT)
    is_gemma = name.startswith("gemma")
    num_groups = 2 if is_gemma or name.startswith("muse") else 1
    return Subject(directory, asked, dict(model.state_dict()), wanted, num_groups, not is_gemma)


def make_image(name: str, grid: Grid, seed: int) -> tuple[Grid, Any]:
    """Return random pixels of a shape."""
    size = FAMILIES[name].vision["patch_size"] if name in GRIDS else IMAGE_SIZE
    tiles, rows, columns = grid
    if name in JOINED:
        rows = columns = IMAGE_SIZE // size
    drawn = np.random.default_rng(seed).integers(0, 256, (tiles, rows * size, columns * size, 3))
    return grid, drawn.astype(np.uint8)


def vision_embeds(model: Any, name: str, grid: Grid) -> int:
    """Return how many embeddings an image has."""
    if name == "granite4_vision":
        return 2 * 2 + 2 * (2 + 1)
    if name in GRIDS:
        side = {"video_llama_3": 1, "pixtral": 1, "minicpmv4_7": 4}.get(name, 2)
        rows, columns = grid[1] // side, grid[2] // side
        return rows * (columns + 1) + 2 if name == "hunyuan_vl" else rows * columns
    return 4 if name == "granite_docling" else 16


def make_config(
    directory: Path,
    *,
    mode: str = "FULL_AND_PIECEWISE",
    overlaps: bool = True,
    num_blocks: int = 40,
    budget: int = 16,
    num_seqs: int = 3,
    dtype: Any = "float32",
) -> EngineConfig:
    return EngineConfig(
        LoadConfig(str(directory), dtype=dtype),
        CacheConfig(BLOCK_SIZE, num_blocks=num_blocks, mamba_block_size=BLOCK_SIZE),
        SchedulerConfig(
            num_seqs, budget, async_scheduling=overlaps, scheduler_reserve_full_isl=False
        ),
        graphs=GraphConfig(mode, None if mode == "NONE" else (2, 16)),
        num_threads=1,
    )


def add(engine: Engine, number: int, asked: Asked, **options: Any) -> None:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    )
    request = EngineCoreRequest(number, asked.prompt, params, items=asked.items, seed=number)
    assert engine.core.add(0, request) is None


def ask(engine: Engine, subject: Subject, names: Sequence[str]) -> None:
    """Run requests together, and check their tokens."""
    first = max(engine.tokens, default=-1) + 1
    for number, name in enumerate(names, first):
        add(engine, number, subject.asked[name])
    engine.run()
    for number, name in enumerate(names, first):
        assert engine.tokens[number] == subject.asked[name].wanted, name


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *map(slow, [name for name in MADE if name != "qwen3_vl"])],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


class Encoded(NamedTuple):
    """A model's directory, an image or a sound, and transformers' embeddings of it."""

    directory: Path
    item: Item
    wanted: Tensor


def encode_sound(directory: Path) -> Encoded:
    """A sound of Gemma 4."""
    model = make_gemma4(directory)
    samples = np.random.default_rng(1).standard_normal(5000) * 0.1
    inputs = audio_inputs([samples.astype(np.float32)], "gemma4")
    features = inputs["input_features"][0][inputs["input_features_mask"][0]].numpy()
    wanted = gemma4_embeddings(model, inputs)
    grid, spans = (len(features), 1, 1), ((0, len(wanted)),)
    return Encoded(directory, Item(bytes(32), spans, grid, features, modality="audio"), wanted)


@torch.inference_mode()
def make_encoded_sound(directory: Path, name: str) -> Encoded:
    """A sound whose tower reads the silence behind it."""
    model = make_audio_model(directory, name)
    samples = np.random.default_rng(1).standard_normal(9000).astype(np.float32)
    inputs = audio_inputs([samples], name)
    wanted = model.get_audio_features(**inputs).pooler_output
    features = inputs["input_features"][0].T.contiguous().numpy()
    mask = inputs.get("input_features_mask", torch.ones(len(features)))
    grid = (int(mask.sum()), 1, 1)
    return Encoded(directory, Item(bytes(32), ((0, len(wanted)),), grid, features, "audio"), wanted)


@torch.inference_mode()
def encode_chunks(directory: Path, name: str) -> Encoded:
    """A sound of Qwen Omni."""
    model = make_omni(directory, name=name)
    samples = np.random.default_rng(1).standard_normal(20_000) * 0.1
    inputs = audio_inputs([samples.astype(np.float32)], name)
    wanted = model.get_audio_features(**inputs, return_dict=True).last_hidden_state
    frames, spans = int(inputs["feature_attention_mask"].sum()), ((0, len(wanted)),)
    features = inputs["input_features"][0].T[:frames].contiguous().numpy()
    return Encoded(directory, Item(bytes(32), spans, (frames, 1, 1), features, "audio"), wanted)


@torch.inference_mode()
def encode_samples(directory: Path, name: str) -> Encoded:
    """A sound whose features are its samples."""
    model = make_audio_model(directory, name)
    samples = np.random.default_rng(1).standard_normal(5120) * 0.1
    inputs = audio_inputs([samples.astype(np.float32)], name)
    wanted = model.get_audio_features(**inputs).pooler_output
    features = inputs["input_values"][0].T.contiguous().numpy()
    spans, grid = ((0, len(wanted)),), (len(features), 1, 1)
    return Encoded(directory, Item(bytes(32), spans, grid, features, "audio"), wanted)


@torch.inference_mode()
def encode_frames(directory: Path, name: str) -> Encoded:
    """A sound whose features transformers has frame by frame."""
    model = make_audio_model(directory, name)
    samples = np.random.default_rng(1).standard_normal(5120) * 0.1
    inputs = audio_inputs([samples.astype(np.float32)], name)
    wanted = model.get_audio_features(**inputs).pooler_output.flatten(0, -2)
    features = inputs["input_features"][0].numpy()
    if "input_features_mask" in inputs:
        features = features[: int(inputs["input_features_mask"].sum())]
    spans, grid = ((0, len(wanted)),), (len(features), 1, 1)
    return Encoded(directory, Item(bytes(32), spans, grid, features, "audio"), wanted)


SOUNDS = {
    "voxtral": partial(make_encoded_sound, name="voxtral"),
    "glmasr": partial(make_encoded_sound, name="glmasr"),
    "moss_transcribe_diarize": partial(make_encoded_sound, name="moss_transcribe_diarize"),
    "granite_speech": partial(encode_frames, name="granite_speech"),
    "fun_asr_nano": partial(encode_frames, name="fun_asr_nano"),
    "nemotron_h_omni": partial(encode_frames, name="nemotron_h_omni"),
    "omniasr": partial(encode_samples, name="omniasr"),
    "gemma4, a sound": encode_sound,
    "qwen2_5_omni, a sound": partial(encode_chunks, name="qwen2_5_omni"),
    "qwen3_omni_moe, a sound": partial(encode_chunks, name="qwen3_omni_moe"),
}


@pytest.fixture(
    scope="module",
    params=[
        *EACH_FAMILY,
        *(name if name in ("voxtral", "gemma4, a sound") else slow(name) for name in SOUNDS),
    ],
)
def encoded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param in SOUNDS:
        return SOUNDS[request.param](directory)
    model = make_vision_model(request.param, directory)
    any_size = request.param in ANY_SIZE
    sizes = dict(zip(TWO_SIZES, (80, 96), strict=True))
    grid, size = (2, 1, 2), sizes.get(request.param, 64)
    if any_size:
        grid, size = (1, 4, 8), model.config.vision_config.patch_size
    elif request.param in (*JOINED, *BESIDE_WHOLE, "ovis2"):
        grid = (3, 128, 60) if request.param in JOINED else (3, 1, 2)
    shape = (1, grid[1] * size, grid[2] * size, 3) if any_size else (grid[0], size, size, 3)
    pixels = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    wanted = reference_embeddings(model, pixels, grid)
    return Encoded(directory, Item(bytes(32), ((0, len(wanted)),), grid, pixels), wanted)


class TowersConformance:
    def test_embeddings_equal_those_of_transformers(
        self, encoded: Encoded, gpu_device: Device
    ) -> None:
        """The host waits for nothing, and the device keeps little but the result."""
        load = LoadConfig(str(encoded.directory), dtype="float32")
        loaded = load_model(load, DeviceMemory(gpu_device), auto_dtype, check_model)
        items = make_item_embeds(loaded, Transfers(gpu_device).send_one)
        plan = StepPlan(0, encodes=[Encode(4, encoded.item)])
        with torch.inference_mode(), no_waits(gpu_device):
            items.update(plan)
        (found,) = items._by_number.values()
        assert found.device == gpu_device.torch_device
        assert items.workspace_bytes == encoded.wanted.nbytes
        difference = (found.cpu() - encoded.wanted).abs().max()
        assert float(difference) < TOLERANCE * float(encoded.wanted.abs().max())


class ImagesConformance:
    @pytest.mark.parametrize(
        ("mode", "overlaps"),
        [
            ("FULL_AND_PIECEWISE", True),
            slow("NONE", True),
            slow("NONE", False),
            slow("FULL", True),
            slow("PIECEWISE", False),
        ],
    )
    def test_greedy_tokens_equal_those_of_transformers(
        self, subject: Subject, gpu_device: Device, mode: str, overlaps: bool
    ) -> None:
        """Requests with and without images share steps; then each runs alone, text behind
        images, and finds its blocks in the prefix cache."""
        engine = Engine(make_config(subject.directory, mode=mode, overlaps=overlaps), gpu_device)
        ask(engine, subject, ["one", "text", "two"])
        ask(engine, subject, ["short text"])
        ask(engine, subject, ["two"])
        assert engine.core.scheduler.stats.prefix_hit_tokens > 0

    @pytest.mark.slow
    def test_an_image_may_have_steps_of_one_token(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        """Each step has one token, but where images must not be cut."""
        budget = 1 if subject.cuts_images else 16
        config = make_config(subject.directory, budget=budget, num_seqs=1)
        engine = Engine(replace(config, graphs=GraphConfig("FULL", (1,))), gpu_device)
        ask(engine, subject, ["one", "short text"])

    def test_the_host_does_not_wait_for_images(self, subject: Subject, gpu_device: Device) -> None:
        """Nor for the steps before: their tokens are sampled while an image is encoded."""
        engine = Engine(make_config(subject.directory, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["short text"])
        engine.step()
        add(engine, 1, subject.asked["two"])
        with no_waits(gpu_device):
            for _ in range(3):
                engine.step()
        engine.run()
        assert engine.tokens == {
            number: subject.asked[name].wanted for number, name in enumerate(("short text", "two"))
        }

    @pytest.mark.slow
    def test_preempted_requests_see_their_images_again(
        self, subject: Subject, gpu_device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With an encoder cache of the least size."""
        monkeypatch.setattr(loading, "MOST_EMBEDS", 0)
        longest = -(-(len(subject.asked["two"].prompt) + COUNT) // BLOCK_SIZE)
        num_blocks = subject.num_groups * longest + 2
        config = make_config(subject.directory, mode="NONE", num_blocks=num_blocks)
        engine = Engine(config, gpu_device)
        ask(engine, subject, ["two", "one", "text"])
        assert engine.core.scheduler.stats.preemptions > 0

    @pytest.mark.slow
    def test_images_after_sleep_and_with_new_weights(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        """A request falls asleep in the middle of its images, and with other weights the same
        images have other embeddings."""
        engine = Engine(make_config(subject.directory), gpu_device)
        add(engine, 0, subject.asked["two"])
        engine.step()
        engine.core.settle()
        engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
        assert engine.runner.items.workspace_bytes == 0
        engine.call(Method.WAKE_UP)
        engine.run()
        assert engine.tokens[0] == subject.asked["two"].wanted
        ask(engine, subject, ["text", "one"])
        engine.call(Method.SLEEP, {"level": 2, "mode": "keep"})
        engine.call(Method.WAKE_UP)
        engine.runner.model.load_weights(subject.other.items())
        engine.core.weights.weights_changed()
        add(engine, 3, subject.asked["two"])
        engine.run()
        assert engine.tokens[3] == subject.wanted != subject.asked["two"].wanted
