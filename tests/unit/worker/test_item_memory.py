"""The embeddings of images: how much memory they take, of towers of real sizes without memory."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.variants import slow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Storage
from shmllm.models.towers import make_tower
from shmllm.params.items import Item
from shmllm.worker.item_encoders import ImageEncoder
from shmllm.worker.items import item_bytes

QWEN_TEXT = {"num_hidden_layers": 3, "num_attention_heads": 32, "head_dim": 128}
COMMAND: dict[str, Any] = {
    "model_type": "cohere2",
    "vocab_size": 256_000,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
DEEPSEEK_OCR = {
    "model_type": "deepseek_ocr2_text",
    "vocab_size": 129280,
    "hidden_size": 1280,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 8192,
    "mlp_layer_types": ["dense", "sparse"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3VL": {
        "model_type": "qwen3_vl",
        "text_config": {
            **QWEN_TEXT,
            "model_type": "qwen3_vl_text",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
            | {"rope_type": "default"},
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "Qwen2VL": {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16},
    },
    "Qwen2_5_VL": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "Glm4v": {
        "model_type": "glm4v",
        "text_config": {
            "model_type": "glm4v_text",
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "max_position_embeddings": 65536,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        },
        "vision_config": {"model_type": "glm4v"},
    },
    "Mistral3": {
        "model_type": "mistral3",
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        "vision_config": {"model_type": "pixtral", "patch_size": 14},
    },
    "LightOnOcr": {
        "model_type": "lighton_ocr",
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 16384,
        },
        "vision_config": {"model_type": "pixtral", "patch_size": 14},
    },
    "GlmOcr": {
        "model_type": "glm_ocr",
        "text_config": {
            "model_type": "glm_ocr_text",
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 2,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"model_type": "glm_ocr_vision"},
    },
    "PaddleOCRVL": {
        "model_type": "paddleocr_vl",
        "num_hidden_layers": 2,
        "vision_config": {"model_type": "paddleocr_vl"},
    },
    "GotOcr2": {
        "model_type": "got_ocr2",
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": 151860,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
        "vision_config": {"model_type": "got_ocr2_vision"},
    },
    "GraniteDocling": {
        "model_type": "granite_docling",
        "text_config": {"model_type": "granite_docling_text", "num_hidden_layers": 3},
        "vision_config": {"model_type": "granite_docling_vision"},
    },
    "DeepseekOcr": {
        "model_type": "unlimited_ocr",
        "text_config": DEEPSEEK_OCR,
        "vision_config": {"encoder_config": {"hidden_size": 1024}},
    },
    "DeepseekOcr2": {
        "model_type": "deepseek_ocr2",
        "text_config": DEEPSEEK_OCR,
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            },
        },
    },
    "Ovis2": {
        "model_type": "ovis2",
        "vocab_size": 151936,
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
        },
        "vision_config": {
            "vocab_size": 65536,
            "hidden_stride": 2,
            "image_size": 448,
            "num_attention_heads": 8,
        },
    },
    "DeepseekVLV2": {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "image_token_id": 0,
        "language_config": {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "model_type": "vision",
            "layers": 27,
            "mlp_ratio": 3.7362,
            "patch_size": 14,
            "width": 1152,
        },
    },
    "Llava": {
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "num_hidden_layers": 2,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
    },
    "InternVL": {
        "model_type": "internvl",
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": 151674,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
        "vision_config": {"model_type": "internvl_vision"},
    },
    "Llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 2,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "max_position_embeddings": 262144,
        },
        "vision_config": {
            "hidden_size": 1408,
            "intermediate_size": 5632,
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "vision_output_dim": 4096,
        },
    },
    "AyaVision": {
        "model_type": "aya_vision",
        "alignment_intermediate_size": 28672,
        "text_config": COMMAND | {"hidden_size": 4096, "num_attention_heads": 32},
        "vision_config": SIGLIP | {"image_size": 364, "intermediate_size": 4304, "patch_size": 14},
    },
    "Cohere2Vision": {
        "model_type": "cohere2_vision",
        "text_config": COMMAND | {"hidden_size": 12288, "num_attention_heads": 96},
        "vision_config": SIGLIP | {"image_size": 512, "intermediate_size": 4304},
    },
    "Lfm2Vl": {
        "model_type": "lfm2_vl",
        "text_config": {
            "model_type": "lfm2",
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "layer_types": ["conv", "full_attention"],
        },
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "vision_use_head": False,
        },
    },
    "DotsOCR": {
        "architectures": ["DotsOCRForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "vision_config": {"model_type": "dots_vit"},
    },
    "HunYuanVL": {
        "model_type": "hunyuan_vl",
        "vocab_size": 120818,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"mrope_section": [16] * 4},
        "vision_config": {"model_type": "hunyuan_vl_vision"},
    },
    "Lfm3Vl": {
        "model_type": "lfm3_vl",
        "text_config": {
            "model_type": "lfm3",
            "vocab_size": 128000,
            "hidden_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
        },
        "vision_config": {"model_type": "lfm3_vl_vision"},
    },
    "Gemma3": {
        "model_type": "gemma3",
        "image_token_index": 262144,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    },
    "Gemma4": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "standardize": True,
        },
    },
    "SmolVLM": {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "scale_factor": 3,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49280,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
    },
}
"""The sizes of Qwen3-VL-8B, Qwen2-VL-7B, Qwen2.5-VL-7B, GLM-4.1V-9B, Mistral Small 3.1,
LightOnOCR-2, GLM-OCR, PaddleOCR-VL, GOT-OCR 2, LLaVA-1.5-7B, InternVL3-8B, Llama 4 Scout, Aya
Vision 8B, Command A Vision, LFM2-VL-1.6B, HunyuanOCR, LFM3-VL-2B, Gemma 3 4B, Gemma 4 31B and
SmolVLM (2B), with fewer layers of text."""


ALIKE = (
    *("AyaVision", "LightOnOcr", "GlmOcr", "PaddleOCRVL", "GotOcr2", "DeepseekOcr2"),
    *("DeepseekOcr", "DeepseekVLV2", "DotsOCR"),
    *("HunYuanVL", "Lfm3Vl"),
)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Allocations(TorchDispatchMode):
    """Counts the bytes of meta tensors that are made inside.

    Args:
        known: tensors that existed before.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = [each.untyped_storage() for each in known]
        self._seen = {id(each) for each in self._known}
        self._now = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == "meta":
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._seen:
            self._seen.add(id(storage))
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, id(storage), storage.nbytes()).atexit = False

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self._now -= num_bytes


@pytest.mark.parametrize("name", [slow(name) if name in ALIKE else name for name in CONFIGS])
def test_the_estimate_covers_the_largest_image(name: str, tmp_path: Path) -> None:
    """In bfloat16, by at most a third: a GPU does without that memory."""
    content = {"architectures": [f"{name}ForConditionalGeneration"]} | CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ModelConfig.from_directory(tmp_path)
    vision, length = model.vision, model.max_position_embeddings
    assert vision is not None
    config = EngineConfig(LoadConfig(str(tmp_path)), CacheConfig(), SchedulerConfig(64, 2048))
    loaded: Any = SimpleNamespace(config=model, dtype=torch.bfloat16, max_model_len=length)
    most = min(length, 16_384)
    if vision.merge_size:
        rows = 2 * int(most**0.5)
        if vision.most_patches:
            rows = int(vision.most_patches**0.5) // vision.merge_size * vision.merge_size
        grid, size = (1, rows, rows), rows * vision.patch_size
    else:
        grid, size = (1, 1, 1), vision.tile_size
        if vision.side_of(grid) != size:  # that of the whole image
            grid = (1, 0, 0)
        elif not vision.num_embeddings(grid):  # the whole is beside another tile
            grid = (2, 1, 1)

    tower = make_tower(vision, model.hidden_size, Storage(allocate, torch.bfloat16))
    weights = [each[0] for each in tower.named_weights.values()]
    table = torch.empty((3, 256), dtype=torch.bfloat16, device="meta")
    encode = ImageEncoder(tower, table, lambda tile: allocate(tile.shape, torch.uint8))
    pixels = np.broadcast_to(np.uint8(0), (grid[0], size, size, 3))
    with torch.inference_mode(), torch.device("meta"), Allocations(weights) as counted:
        (found,) = encode([Item(bytes(32), ((0, most),), grid, pixels)])
    kept = most * found.shape[1] * found.itemsize
    needed = kept + counted.peak - found.nbytes
    assert needed < item_bytes(config, loaded) < 4 / 3 * needed


HEARING: dict[str, dict[str, Any]] = {
    "Gemma4ForConditionalGeneration": {
        "text_config": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 2}
        | {"vocab_size": 262144, "num_attention_heads": 8, "layer_types": ["full_attention"] * 2},
        "audio_config": {"model_type": "gemma4_audio", "num_hidden_layers": 2},
    },
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        "text_config": {"num_hidden_layers": 2},
        "audio_config": {"encoder_layers": 2},
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        "text_config": {"num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 152064},
        "audio_config": {"encoder_layers": 2, "output_dim": 2048},
    },
}


@pytest.mark.parametrize(
    ("architecture", "count"),
    [
        ("Gemma4ForConditionalGeneration", 750),
        slow("Qwen2_5OmniThinkerForConditionalGeneration", 7500),
        slow("Qwen3OmniMoeThinkerForConditionalGeneration", 31_200),
    ],
)
def test_the_estimate_covers_the_longest_sound(
    architecture: str, count: int, tmp_path: Path
) -> None:
    """As for images, with the towers of Gemma 4 E2B and Qwen 2.5 Omni."""
    content = HEARING[architecture] | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ModelConfig.from_directory(tmp_path)
    assert model.audio is not None
    config = EngineConfig(LoadConfig(str(tmp_path)), CacheConfig(), SchedulerConfig(64, 2048))
    loaded: Any = SimpleNamespace(config=model, dtype=torch.bfloat16, max_model_len=2048)

    tower = make_tower(model.audio, model.hidden_size, Storage(allocate, torch.bfloat16))
    weights = [each[0] for each in tower.named_weights.values()]
    frames = model.audio.tower.most_frames
    with torch.inference_mode(), torch.device("meta"), Allocations(weights) as counted:
        found = tower(torch.empty((frames, 128)), (frames, 1, 1))
    assert len(found) == count
    kept = 2048 * model.hidden_size * 2
    assert counted.peak < item_bytes(config, loaded) - kept < 4 / 3 * counted.peak


EVERY = {
    content.get("architectures", [f"{name}ForConditionalGeneration"])[0]: content
    for name, content in CONFIGS.items()
} | HEARING


@pytest.mark.parametrize("architecture", EVERY)
def test_no_tower_waits_until_cycles_are_collected(architecture: str, tmp_path: Path) -> None:
    content = EVERY[architecture] | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ModelConfig.from_directory(tmp_path)
    for spec in filter(None, (model.vision, model.audio)):
        tower = make_tower(spec, model.hidden_size, Storage(allocate, torch.bfloat16))
        found = weakref.ref(tower)
        del tower
        assert found() is None
