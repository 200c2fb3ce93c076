"""Small random models that see images, made by transformers, and the tokens that it generates.

A directory has what an engine and its front end read: config, weights, a tokenizer with the marks
of the family, a chat template, and the settings of the images' preparation.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support import blip_2_model, deepseek_vl2_model, dots_ocr_model, published_deepseek
from support.kimi_files import save_published
from support.one_thread import one_thread
from support.torchvision_modules import import_without_torchvision
from support.variants import slow
from support.vision_families import (
    FAMILIES,
    PREPARED,
    VOCAB_SIZE,
    WHISPER_SETTINGS,
    VisionFamily,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma4_unified
from transformers.models.hunyuan_vl import modeling_hunyuan_vl as hunyuan_vl

from shmllm.params.items import MODALITIES, Grid

FIRST_MARK = 440
"""The id of a family's first mark. Those before it that stand for no byte are never used."""
# transformers 5.24 lacks these models.
for _name in ("DeepseekVL2Config", "DeepseekVL2ForConditionalGeneration"):
    setattr(transformers, _name, getattr(deepseek_vl2_model, _name))
transformers.DotsOCRConfig = dots_ocr_model.DotsOCRConfig
transformers.DotsOCRForConditionalGeneration = dots_ocr_model.DotsOCRForCausalLM
transformers.Blip2ForConditionalGeneration = blip_2_model.Blip2ForConditionalGeneration
# Llama 4's class reads the attribute, which no class has, in transformers 5.24.
transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None


# Gemma 4 12B's class masks images as Gemma 3 unless the cache is static; vLLM always has this mask.
def _masks_of_gemma4(**arguments: Any) -> Any:
    make = gemma4_unified.create_masks_for_vision_model
    return make(**arguments) if "block_sequence_ids" in arguments else _MASKS(**arguments)


# HunyuanOCR's class turns the elements of a pair by different axes; this is its authors' formula.
def _angles_of_hunyuan(self: Any, angles: Tensor) -> Tensor:
    parts = angles.split(self.mrope_section, -1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)] * 2, -1)


# MiniCPM-V 4.7's class counts each axis on from the last token of a prompt, which may be the end of
# an image; this is behind the largest position, as in its `rope_deltas` and in vLLM.
def _count_on(self: Any, *arguments: Any, **options: Any) -> Any:
    found = super(MiniCPMV4_7, self)._update_model_kwargs_for_generation(*arguments, **options)
    if (places := found.get("position_ids")) is not None and self.model.rope_deltas is not None:
        places[1:, :, -1] = places[0, :, -1] + self.model.rope_deltas[:, 0]
    return found


MiniCPMV4_7 = transformers.MiniCPMV4_7ForConditionalGeneration
MiniCPMV4_7._update_model_kwargs_for_generation = _count_on
hunyuan_vl.HunYuanVLRotaryEmbedding.recomposition_frequencies = _angles_of_hunyuan
_MASKS = gemma4_unified.create_masks_for_generate
gemma4_unified.create_masks_for_generate = _masks_of_gemma4
LFM2_VL = import_without_torchvision("lfm2_vl.image_processing_lfm2_vl")
VISION_FAMILIES = tuple(FAMILIES)
"""The names that `make_vision_model` knows."""
ALIKE = (
    *("llava_next_video", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_5_moe"),
    *("deepseek_vl", "glm4v_moe", "glm46v", "hyperclovax_vision_v2", "qianfan_ocr", "minicpm_ocr"),
    "minicpmv4_7",
)
"""Families with the tower of another one."""
ANY_SIZE = tuple(
    name
    for name in VISION_FAMILIES
    if name.startswith(
        ("dots", "ernie", "exaone", "gemma4", "glm", "hunyuan", "hyper", "kimi", "lfm", "lighton")
    )
    or name.startswith(
        ("minicpm", "minimax", "mistral", "muse", "paddle", "pixtral", "qwen", "video")
    )
)
"""Families whose tower takes images of any size."""
AXES = ("ernie", "gemma4", "glm", "hunyuan", "minicpmv4_7", "paddle", "qwen")
"""The beginnings of the names of families whose modules in transformers are told which tokens are
those of images."""
PUBLISHED = ("deepseek_ocr", "deepseek_vl2")
"""Families whose images have no settings in a file of transformers."""
TWO_SIZES = ("deepseek_ocr", "deepseek_ocr2")
"""Families whose tiles have another size than the whole of an image."""
BESIDE_WHOLE = ("deepseek_vl2",)
"""Families of whose images one tile has the whole, and there is always another one."""
JOINED = ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")
"""Families whose tiles make up a picture."""
EACH_FAMILY = tuple(slow(name) if name in ALIKE else name for name in VISION_FAMILIES)
"""The same as parameters of a test, those with the tower of another family outside of the default
suite."""


def make_vision_model(
    name: str,
    directory: Path,
    *,
    vision: dict[str, Any] | None = None,
    outer: dict[str, Any] | None = None,
    **text: Any,
) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        name: one of VISION_FAMILIES.
        directory: where its files are written to.
        vision: further fields of config.json's ``vision_config``.
        outer: further fields of config.json itself.
        text: further fields of its ``text_config``.

    Returns:
        The model, with the attribute ``vision_family`` for the other functions here.
    """
    family = FAMILIES[name]
    torch.manual_seed(7)
    tokenizer = tokenizer_with(family.marks)
    ids = {field: tokenizer.token_to_id(mark) for field, mark in family.ids.items()}
    end = tokenizer.token_to_id(family.marks[0])
    config = getattr(transformers, f"{family.model}Config")(
        text_config=family.text | {"bos_token_id": None, "eos_token_id": end} | text,
        vision_config=family.vision | (vision or {}),
        **({"tie_word_embeddings": False} | family.outer | ids | (outer or {})),
    )
    model = getattr(transformers, family.architecture)(config).eval()
    draw_weights(model, 0.0 if name.startswith(("gemma3", "paligemma")) else 1.0)
    draw_buffers(model)
    model.vision_family = name
    silence_marks(model)
    model.generation_config.eos_token_id = None
    if name == "kimi_k25":
        model.save_pretrained = partial(save_published, model, model.save_pretrained)
    if name == "deepseek_ocr":
        model.save_pretrained = partial(published_deepseek.save_published, model.save_pretrained)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "generation_config.json", {"eos_token_id": end})
    write_settings(name, directory)
    if "omni" in name:  # whose frames have bounds of their own
        _write(directory / "video_preprocessor_config.json", PREPARED | family.settings)
    return model


def write_settings(name: str, directory: Path) -> None:
    """Writes the settings of a family's tokenizer and of the preparation of its images."""
    _write(directory / "tokenizer_config.json", _tokenizer_config(FAMILIES[name]))
    if name not in PUBLISHED:  # whose settings the configuration of the model has
        _write(directory / "preprocessor_config.json", image_settings(name))


def image_settings(name: str) -> dict[str, Any]:
    """The contents of a family's preprocessor_config.json, which has the settings of sounds, too,
    as published files of models that hear."""
    family = FAMILIES[name]
    kind = f"{family.processor[0]}ImageProcessor"
    sounds = WHISPER_SETTINGS if "audio_config" in family.outer else {}
    return {"image_processor_type": kind, **PREPARED, **family.settings, **sounds}


def image_processor(name: str, **settings: Any) -> Any:
    """transformers' preparation of a family's images with pillow and numpy, which is exact.

    Args:
        name: one of VISION_FAMILIES.
        settings: take the place of those in preprocessor_config.json.
    """
    (kind, module), own = FAMILIES[name].processor, FAMILIES[name].settings
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{kind}ImageProcessorPil")(**(PREPARED | own | settings))


class Prepared(Protocol):
    """An image as a front end prepares it.

    Attributes:
        data: its tiles, [tiles, height, width, 3] uint8.
        grid: how they lie.
    """

    @property
    def data(self) -> Any: ...

    @property
    def grid(self) -> Grid: ...


def pixel_inputs(
    name: str, tiles: npt.NDArray[np.uint8], grid: Grid = (1, 1, 1), **settings: Any
) -> dict[str, Tensor]:
    """What transformers' model takes for one image whose tiles are cut and resized already.

    Args:
        name: one of VISION_FAMILIES.
        tiles: [tiles, height, width, 3].
        grid: how they lie; only those of JOINED say what the tiles do not.
        settings: take the place of those in preprocessor_config.json.

    Returns:
        The arguments of ``get_image_features`` and ``forward`` but for the tokens.
    """
    own = _OWN_INPUTS.get(name)
    if own is not None:
        return own(name, tiles, grid)
    kept = {"do_resize": False, "do_center_crop": False, "do_pan_and_scan": False}
    kept["crop_to_patches"] = False
    if "do_image_splitting" in FAMILIES[name].settings:
        kept |= {"do_image_splitting": False, "do_pad": False}
    known = {key: value for key, value in kept.items() if key in image_processor(name).to_dict()}
    images: Any = [[tile] for tile in tiles] if "do_pad" in known else list(tiles)
    found = dict(image_processor(name, **known, **settings)(images, return_tensors="pt"))
    pixels = found["pixel_values"]
    if pixels.dim() == 5:  # one image of several tiles instead of several images
        found["pixel_values"] = pixels.transpose(0, 1)
    used = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
    return {key: found[key] for key in (*used, "image_merge_sizes") if key in found}


Tiles = npt.NDArray[np.uint8]


def _pixels(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    """Of families that are prepared with torchvision alone."""
    return {"pixel_values": normalised(name, tiles)}


def _patches(name: str, tiles: Tiles) -> Tensor:
    pixels = normalised(name, tiles).unflatten(-1, (-1, 14)).unflatten(-3, (-1, 14))
    patches: Tensor = pixels.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    return patches


def _kimi(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    patches = _patches(name, tiles)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}


def _muse_glimmer(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    patches = _patches(name, tiles).flatten(1).repeat(1, 2)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}


def _two_sizes(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    pixels, is_whole = normalised(name, tiles), grid[1:] == (0, 0)
    side = FAMILIES[name].settings["size"]["height"]
    found = {"pixel_values": pixels if is_whole else torch.zeros(1, 3, side, side)}
    found["num_local_patches"] = torch.tensor([0 if is_whole else len(tiles)])
    if name == "deepseek_ocr":
        found["patches_grid"] = torch.tensor([grid[:0:-1]])
    return found if is_whole else found | {"pixel_values_local": pixels}


def _deepseek_vl2(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    return {"pixel_values": normalised(name, tiles), "grids": torch.tensor([grid])}


def _granite_docling(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    mask = torch.ones(1, len(tiles), dtype=torch.bool)
    return {"pixel_values": normalised(name, tiles)[None], "pixel_attention_mask": mask}


def _minicpm(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    rows = normalised(name, tiles)[0].unflatten(-1, (-1, 14)).unflatten(-3, (-1, 14))
    patches = rows.permute(0, 2, 1, 3, 4).flatten(2)
    return {"pixel_values": patches[None], "target_sizes": torch.tensor([grid[1:]])}


def _lfm2_vl(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    patches = LFM2_VL.convert_image_to_patches(normalised(name, tiles), 16)
    mask = torch.ones(patches.shape[:2], dtype=torch.int32)
    shape = torch.tensor([grid[1:]])
    return {"pixel_values": patches, "spatial_shapes": shape, "pixel_attention_mask": mask}


def _joined(name: str, tiles: Tiles, grid: Grid) -> dict[str, Tensor]:
    pixels = normalised(name, tiles)[None]
    found = {"pixel_values": pixels, "image_sizes": torch.tensor([grid[1:]])}
    return found | ({"batch_num_images": torch.tensor([2])} if len(tiles) == 1 else {})


_OWN_INPUTS: dict[str, Callable[[str, Tiles, Grid], dict[str, Tensor]]] = {
    "llama4": _pixels,
    "cohere2_vision": _pixels,
    "kimi_k25": _kimi,
    "muse_glimmer": _muse_glimmer,
    "gemma4_unified": lambda name, tiles, grid: squares_of_frames(name, tiles),
    "deepseek_vl2": _deepseek_vl2,
    "granite_docling": _granite_docling,
    "lfm2_vl": _lfm2_vl,
    **dict.fromkeys(TWO_SIZES, _two_sizes),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"), _minicpm),
    **dict.fromkeys(JOINED, _joined),
}
"""Families for which `pixel_inputs` cannot use transformers' preparation with pillow."""


def squares_of_frames(
    name: str, frames: npt.NDArray[np.uint8], count: int = 70
) -> dict[str, Tensor]:
    """What Gemma 4 12B takes for images of one size: the pixels of squares in the order of rows,
    filled up to so many, and their columns and rows."""
    side = FAMILIES[name].vision["patch_size"] * FAMILIES[name].vision["pooling_kernel_size"]
    squares = normalised(name, frames).unflatten(-1, (-1, side)).unflatten(-3, (-1, side))
    pixels = squares.permute(0, 2, 4, 3, 5, 1).flatten(3)
    axes = (torch.arange(size) for size in pixels.shape[1:3])
    places = torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], -1).flatten(0, 1)
    fill = (0, 0, 0, count - len(places))
    return {
        "pixel_values": torch.nn.functional.pad(pixels.flatten(1, 2), fill),
        "image_position_ids": torch.nn.functional.pad(places, fill, value=-1)[None].expand(
            len(frames), -1, -1
        ),
    }


def normalised(name: str, tiles: npt.NDArray[np.uint8]) -> Tensor:
    """The pixels of tiles as a tower takes them.

    Args:
        name: one of VISION_FAMILIES.
        tiles: [tiles, height, width, 3].

    Returns:
        [tiles, 3, height, width], float32.
    """
    settings = FAMILIES[name].settings
    if name == "llama4":  # whose processor rounds every result to bfloat16
        pixels = torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).bfloat16()
        return pixels.mul(PREPARED["rescale_factor"]).sub(0.5).div(0.5).float()
    mean, std = (np.array(settings[key], np.float32) for key in ("image_mean", "image_std"))
    if name in (
        "lfm2_vl",
        "cohere2_vision",
        "kimi_k25",
        "muse_glimmer",
    ):  # whose mean and deviation have the scale
        pixels = torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).float()
        factors = (torch.from_numpy(each)[:, None, None] * 255 for each in (mean, std))
        return pixels.sub(next(factors)).div(next(factors))
    # Gemma 4's are not normalised: its mean is 0 and its standard deviation 1.
    scaled = (tiles * PREPARED["rescale_factor"]).astype(np.float32)
    return torch.from_numpy(((scaled - mean) / std).transpose(0, 3, 1, 2))


@one_thread()
@torch.inference_mode()
def reference_embeddings(
    model: Any, tiles: npt.NDArray[np.uint8], grid: Grid = (1, 1, 1), **settings: Any
) -> Tensor:
    """transformers' embeddings of one image.

    Args:
        model: what `make_vision_model` returned.
        tiles: [tiles, height, width, 3].
        grid: how they lie, see `pixel_inputs`.
        settings: take the place of those in preprocessor_config.json.

    Returns:
        [embeddings, (1 + levels) * hidden]: an embedding, and its further levels behind it.
    """
    features = getattr(model, "get_image_features", None) or model.model.get_image_features
    found = features(**pixel_inputs(model.vision_family, tiles, grid, **settings))
    if model.vision_family == "llama4":
        projected: Tensor = model.multi_modal_projector(found.last_hidden_state)
        return projected.flatten(0, 1)
    if model.vision_family == "ovis2":
        return with_visual_marks(found, grid)
    if model.vision_family == "granite4_vision":  # the first one replaces a token's, unscaled
        parts = {layer: torch.cat(each) for layer, each in sorted(found.deepstack_features)}
        first = parts.pop(0, torch.zeros_like(parts[1]))
        scale = model.config.text_config.embedding_multiplier
        return torch.cat([first / scale, *parts.values()], -1)
    main: Tensor = torch.cat(list(found.pooler_output))
    if model.vision_family in TWO_SIZES and grid[1:] != (0, 0):
        of_whole = len(found.last_hidden_state[0])
        ends = isqrt(of_whole) if model.vision_family == "deepseek_ocr" else 0
        return main[: -of_whole - ends - 1]  # without the whole and what ends it, and its rows
    levels = getattr(found, "deepstack_features", None) or ()
    return torch.cat([main, *(torch.cat(list(each)) for each in levels)], -1)


def with_visual_marks(found: Any, grid: Grid) -> Tensor:
    """The embeddings of the tiles of Ovis 2, of which the first is the whole image, with those of
    the marks around and between them in the order of transformers' processor."""
    whole, *tiles = found.pooler_output
    begin, behind_whole, behind_column, behind_row, end = found.visual_indicator_features.split(1)
    parts = [begin, whole, behind_whole]
    for row in range(grid[1] if tiles else 0):
        parts += [behind_row] if row else []
        for column in range(grid[2]):
            parts += [behind_column] if column else []
            parts.append(tiles[row * grid[2] + column])
    return torch.cat([*parts, end])


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    token_ids: Sequence[int],
    images: Sequence[Prepared],
    max_new_tokens: int = 12,
) -> list[int]:
    """transformers' greedy tokens; nothing but their number ends them.

    Args:
        model: what `make_vision_model` returned.
        token_ids: the prompt, with as many of the family's image tokens as there are embeddings.
        images: the images, prepared.
        max_new_tokens: how many.
    """
    inputs = joined_inputs(model.vision_family, images) if images else {}
    ids = torch.tensor([list(token_ids)])
    is_image = (ids == image_token(model)).long()
    inputs |= prompt_types(model, ids)
    if "omni" in model.vision_family:
        pass  # it finds the tokens itself
    elif model.vision_family.startswith(AXES):
        inputs["mm_token_type_ids"] = is_image
    elif model.vision_family == "gemma3":
        inputs["token_type_ids"] = is_image
    if model.vision_family == "minicpmv4_7":  # which keeps what images before have moved
        model.model.rope_deltas = None
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **inputs,
    )
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def prompt_types(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The input that says which tokens attend to all of the prompt, or go to experts of images, of
    families that have it."""
    if model.vision_family.startswith("ernie"):
        names = FAMILIES[model.vision_family].ids
        marks = torch.tensor([getattr(model.config, name) for name in names])
        return {"moe_mm_token_type_ids": torch.isin(ids, marks).long()}
    spans = model.vision_family.startswith("paligemma")
    return {"token_type_ids": torch.zeros_like(ids)} if spans else {}


def joined_inputs(name: str, images: Sequence[Prepared]) -> dict[str, Tensor]:
    """As `pixel_inputs`, for all images of one prompt. Images whose sizes stand beside them are
    padded to one, or their tiles to one number."""
    each = [pixel_inputs(name, image.data, image.grid) for image in images]
    if name in JOINED:
        tiles = [one["pixel_values"][0] for one in each]
        found = {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True),
            "image_sizes": torch.cat([one["image_sizes"] for one in each]),
        }
        count = {"batch_num_images": torch.tensor([len(each)])}
        return found | (count if name == "llava_onevision" else {})
    if name in TWO_SIZES:  # tiles are before the whole of their image
        tiles = [one.pop("pixel_values_local") for one in each if "pixel_values_local" in one]
        counts, grids = [], []
        of_all: dict[str, Any] = {"pixel_values_local": torch.cat(tiles)} if tiles else {}
        wholes = [one for image, one in zip(images, each, strict=True) if image.grid[1:] == (0, 0)]
        for before, image in zip([None, *images], images, strict=False):
            if image.grid[1:] == (0, 0):
                has_tiles = before is not None and before.grid[1:] != (0, 0)
                counts.append(before.grid[0] if has_tiles and before is not None else 0)
                grids.append(before.grid[:0:-1] if has_tiles and before is not None else (1, 1))
        of_all |= {"num_local_patches": counts}
        of_all |= {"patches_grid": grids} if name == "deepseek_ocr" else {}
        return of_all | {"pixel_values": torch.cat([one["pixel_values"] for one in wholes])}
    if name.startswith("minicpm"):
        return {
            "pixel_values": torch.cat([one["pixel_values"] for one in each], -1),
            "target_sizes": torch.cat([one["target_sizes"] for one in each]),
        }
    if name == "lfm2_vl":
        return {
            key: torch.nn.utils.rnn.pad_sequence(
                [part for one in each for part in one[key]], batch_first=True
            )
            for key in each[0]
        }
    if "image_sizes" in each[0]:
        height, width = torch.cat([one["image_sizes"] for one in each]).amax(0).tolist()
        for one in each:
            own = one["pixel_values"]
            padding = (0, width - own.shape[-1], 0, height - own.shape[-2])
            one["pixel_values"] = torch.nn.functional.pad(own, padding)
    tiled = each[0]["pixel_values"].dim() == 5
    return {
        key: torch.cat([one[key] for one in each], int(tiled and key.startswith("pixel_")))
        for key in each[0]
    }


def image_token(model: Any) -> int:
    """The token of whose embeddings an image's take the place."""
    found: int = model.config.image_token_id
    return found


def draw_weights(model: torch.nn.Module, norms: float) -> None:
    """Draws weights that hide no mistake, and with which items change tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            tower = "language_model" not in name and "text_model" not in name
            mean = 1.0 if is_norm and tower and "soft_emb" not in name else norms
            if tower and name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
                mean = 0.5  # Gemma 4's tower does not scale its scores
            parameter.normal_(mean if is_norm else 0.0, 0.2 if is_norm else 0.12)


def silence_marks(model: Any) -> None:
    """Lets Gemma 4, Kimi and Muse Glimmer generate no mark of an item, which transformers would
    read as padding, or as the first token."""
    if model.vision_family.startswith(("gemma4", "kimi", "muse")):
        marks = [getattr(model.config, f"{kind}_token_id", None) for kind in MODALITIES]
        with torch.no_grad():
            model.lm_head.weight[[mark for mark in marks if mark is not None]] = 0


def draw_buffers(model: torch.nn.Module) -> None:
    """Draws what Gemma 4's towers have beside parameters: bounds, a shift and a scale."""
    drawn = {"put_min": (-2.5, 0.3), "put_max": (2.5, 0.3)}
    drawn |= {"std_bias": (0.0, 0.5), "std_scale": (1.0, 0.3)}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            for end, (mean, deviation) in drawn.items():
                if name.endswith(end):
                    buffer.normal_(mean, deviation)


def tokenizer_with(marks_of_family: Sequence[str], first_mark: int = FIRST_MARK) -> Tokenizer:
    """Bytes, some newlines in one token, and the marks of a family from a token on."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"
    names = [*letters, *(newline * count for count in (2, 3, 4))]
    names += [f"<unused{number}>" for number in range(first_mark - len(names))]
    merges = [(newline, newline), (newline * 2, newline), (newline * 2, newline * 2)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, normalized=False, special=True) for mark in marks_of_family]
    tokenizer.add_special_tokens(marks)
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer


def _tokenizer_config(family: VisionFamily) -> dict[str, Any]:
    end, begin = family.marks[:2]
    video = family.chat.replace("image", "video")
    if "<|video|>" in family.marks:
        video = family.chat.replace(family.image, "<|video|>")
    template = (
        f"{{% for message in messages %}}{begin}{{{{ message['role'] }}}}\n"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ '{family.chat}' }}}}"
        f"{{% elif part['type'] == 'video' %}}{{{{ '{video}' }}}}"
        "{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        f"{end}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begin}assistant\n{{% endif %}}"
    )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "chat_template": template,
        "image_token": family.image,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
