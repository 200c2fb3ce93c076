"""What is checked of an image or a video before any step has to compute it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shmllm.errors import RequestError
from shmllm.models.audio.specs import AudioSpec, KeysTower
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.projected_specs import Idefics3Tower
from shmllm.models.vision.specs import VideoSpec, VisionSpec
from shmllm.models.vision.squares_specs import Qwen3Tower
from shmllm.params.items import Item
from shmllm.worker.item_checks import check_item, check_item_embeds

QWEN = VisionSpec(
    image_token=1,
    merge_size=2,
    has_axes=True,
    tower=Qwen3Tower(
        hidden_size=32, num_layers=2, num_heads=2, inner=64, patch_size=16, num_frames=2,
        merge_size=2, activation="gelu", theta=1e4, num_positions=16, level_layers=(),
    ),
)  # fmt: skip
SMOLVLM = VisionSpec(
    image_token=1,
    tile_embeddings=4,
    tower=Idefics3Tower(
        encoder=EncoderSpec(
            kind="siglip", hidden_size=32, num_layers=2, num_heads=2, inner=64, image_size=64,
            patch_size=16, activation="gelu_tanh", eps=1e-6,
        ),
        factor=2,
    ),
)  # fmt: skip


def pixels(*shape: int) -> Any:
    return np.zeros((*shape, 3), np.uint8)


IMAGE = Item(bytes(32), ((3, 9),), (1, 4, 6), pixels(1, 64, 96))
TILES = Item(bytes(32), ((3, 7), (9, 13), (14, 18)), (3, 1, 2), pixels(3, 64, 64))


def test_images_that_a_tower_takes() -> None:
    check_item(IMAGE, {"image": QWEN})
    check_item(TILES, {"image": SMOLVLM})
    check_item(replace(TILES, grid=(3, 0, 0)), {"image": SMOLVLM})


@pytest.mark.parametrize("bound", [{"most_patches": 20}, {"longest_side": 5}])
def test_a_tower_may_have_bounds_of_patches(bound: dict[str, int]) -> None:
    bounded = replace(QWEN, tower=replace(QWEN.tower, **bound))
    with pytest.raises(RequestError, match=r"an item \(image\) of grid \(1, 4, 6\)"):
        check_item(IMAGE, {"image": bounded})
    smaller = replace(IMAGE, spans=((3, 7),), grid=(1, 4, 4), data=pixels(1, 64, 64))
    check_item(smaller, {"image": bounded})


WRONG: dict[str, dict[str, Any]] = {
    "two frames": {
        "grid": (2, 4, 6),
        "data": pixels(2, 64, 96),
        "spans": ((3, 15),),
    },
    "pieces": {"spans": ((3, 5), (6, 10))},
    "no whole squares": {"grid": (1, 4, 7), "data": pixels(1, 64, 112), "spans": ((3, 10),)},
    "no patches": {"grid": (1, 0, 6), "data": pixels(1, 0, 96)},
    "no frames": {"grid": (0, 4, 6), "data": pixels(0, 64, 96)},
    "other pixels": {"data": pixels(1, 96, 64)},
    "a huge grid": {"grid": (1, 2**32 - 2, 2**32 - 2)},
    "fewer embeddings": {"spans": ((3, 8),)},
}


@pytest.mark.parametrize("case", WRONG)
def test_images_of_any_size_that_it_does_not_take(case: str) -> None:
    with pytest.raises(RequestError, match="an item"):
        check_item(replace(IMAGE, **WRONG[case]), {"image": QWEN})


@pytest.mark.parametrize(
    "change",
    [
        {"data": pixels(3, 64, 48)},
        {"data": np.zeros((3, 64, 64, 4), np.uint8)},
        {"data": pixels(2, 64, 64)},
        {"grid": (2, 1, 1)},
        {"grid": (0, 1, 2), "data": pixels(0, 64, 64)},
        {"grid": (2**32 - 1, 1, 2)},
        {"spans": ((3, 14),)},
    ],
)
def test_tiles_that_it_does_not_take(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="an item"):
        check_item(replace(TILES, **change), {"image": SMOLVLM})


def qwen(in_one_piece: bool) -> VisionSpec:
    video = VideoSpec(token=2, processors=("a class",), in_one_piece=in_one_piece)
    return replace(QWEN, video=video)


IN_TIME, AMONG_TEXT = qwen(True), qwen(False)
VIDEO = Item(bytes(32), ((3, 21),), (3, 4, 6), pixels(6, 64, 96), "video", 0.5)
FRAMES = replace(VIDEO, spans=((3, 9), (14, 20), (25, 31)))


def test_videos_that_a_tower_takes() -> None:
    check_item(VIDEO, {"video": IN_TIME})
    check_item(FRAMES, {"video": AMONG_TEXT})
    one = replace(VIDEO, grid=(1, 4, 6), data=pixels(2, 64, 96), spans=((3, 9),))
    for spec in (IN_TIME, AMONG_TEXT):
        check_item(one, {"video": spec, "image": QWEN})


WRONG_VIDEOS: dict[str, dict[str, Any]] = {
    "too few frames": {"data": pixels(5, 64, 96)},
    "frames of the grid only": {"data": pixels(3, 64, 96)},
    "other sides": {"data": pixels(6, 96, 64)},
    "no colours": {"data": np.zeros((6, 64, 96), np.uint8)},
    "no frames": {"grid": (0, 4, 6), "data": pixels(0, 64, 96)},
    "no patches": {"grid": (3, 0, 6), "data": pixels(6, 0, 96)},
    "no whole squares": {"grid": (3, 4, 7), "data": pixels(6, 64, 112)},
    "a huge grid": {"grid": (2**32 - 1, 4, 6)},
}


@pytest.mark.parametrize("case", WRONG_VIDEOS)
@pytest.mark.parametrize("in_time", [True, False])
def test_videos_that_it_does_not_take(case: str, in_time: bool) -> None:
    video, spec = (VIDEO, IN_TIME) if in_time else (FRAMES, AMONG_TEXT)
    with pytest.raises(RequestError, match=r"^an item \(video\) of grid"):
        check_item(replace(video, **WRONG_VIDEOS[case]), {"video": spec})


@pytest.mark.parametrize(
    ("spec", "spans"),
    [
        (IN_TIME, ((3, 20),)),
        (IN_TIME, ((3, 22),)),
        (IN_TIME, FRAMES.spans),
        (IN_TIME, ((3, 12), (14, 23))),
        (AMONG_TEXT, ((3, 21),)),
        (AMONG_TEXT, ((3, 12), (14, 23))),
        (AMONG_TEXT, ((3, 9), (14, 20))),
        (AMONG_TEXT, ((3, 8), (14, 20), (25, 32))),
        (AMONG_TEXT, ((3, 9), (14, 20), (25, 30))),
    ],
)
def test_embeddings_of_videos_that_lie_elsewhere(spec: VisionSpec, spans: Any) -> None:
    with pytest.raises(RequestError, match=r"^an item \(video\) of grid"):
        check_item(replace(VIDEO, spans=spans), {"video": spec})


def test_a_model_without_videos_takes_none() -> None:
    with pytest.raises(RequestError, match="the model takes no videos"):
        check_item(VIDEO, {"image": QWEN})


WHISPER = AudioSpec(
    token=None,
    tower=KeysTower(
        hidden_size=32, num_layers=2, num_heads=2, inner=64, activation="gelu", num_mels=16,
        num_positions=10, num_decoder_layers=2, kv_width=32,
    ),
)  # fmt: skip
SOUND = Item(bytes(32), ((0, 10),), (20, 1, 1), np.zeros((20, 16), np.float32), "audio")


def test_a_decoder_hears_all_positions_of_an_encoder() -> None:
    """Behind a shorter sound it would read what an earlier request left in the KV cache."""
    check_item(SOUND, {"audio": WHISPER})
    shorter = replace(SOUND, grid=(12, 1, 1), data=SOUND.data[:14])
    with pytest.raises(RequestError, match="10 embeddings instead of"):
        check_item(shorter, {"audio": WHISPER})


def test_parts_of_sounds_have_numbers_where_a_model_reads_them() -> None:
    second, none = (replace(SOUND, grid=(20, number, 1)) for number in (2, 0))
    check_item(second, {"audio": replace(WHISPER, counts_parts=True)})
    for item, spec in ((second, WHISPER), (none, replace(WHISPER, counts_parts=True))):
        with pytest.raises(RequestError, match="0 embeddings instead of None"):
            check_item(item, {"audio": spec})


EMBEDS = Item(bytes(32), ((3, 9),), (1, 4, 6), np.ones((6, 8), np.float32), is_embeds=True)


def test_embeddings_that_a_user_gives() -> None:
    check_item_embeds(EMBEDS, {"image": QWEN}, 8, torch.float32)
    divided = replace(EMBEDS, spans=((3, 5), (6, 10)), grid=(1, 1, 1))
    check_item_embeds(divided, {"image": SMOLVLM}, 8, torch.float32)
    check_item_embeds(divided, {"image": SMOLVLM}, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modality": "audio"}, "the model takes no audio clips"),
        ({"grid": (1, 4, 4)}, "has 6 embeddings in 1 pieces instead of 4 in one"),
        ({"grid": (1, 0, 0)}, "has 6 embeddings in 1 pieces instead of 0 in one"),
        ({"spans": ((3, 5), (6, 10))}, "has 6 embeddings in 2 pieces instead of 6 in one"),
        ({"data": np.ones((5, 8), np.float32)}, r"of shape \[5, 8\] instead of \[6, 8\]"),
        ({"data": np.ones((6, 7), np.float32)}, r"of shape \[6, 7\] instead of \[6, 8\]"),
        ({"data": np.full((6, 8), np.nan, np.float32)}, "an item has values that torch.float16"),
        ({"data": np.full((6, 8), 1e5, np.float32)}, "float16 cannot compute with: the largest is"),
    ],
)
def test_embeddings_that_do_not_suit_the_model(change: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_item_embeds(replace(EMBEDS, **change), {"image": QWEN}, 8, torch.float16)
