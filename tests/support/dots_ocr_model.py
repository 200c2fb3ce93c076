"""dots.ocr, which transformers does not have: its Qwen 2, and the tower by the formulas of vLLM
0.33's ``dots_ocr``, in modules of torch under the names of published weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

_MERGER_EPS = 1e-6
_THETA = 10_000.0


class DotsVisionConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "dots_vit"


class DotsOCRConfig(Qwen2Config):  # type: ignore[misc]
    """The fields of the language model outermost, as in published files."""

    model_type = "dots_ocr"

    def __init__(self, text_config: Any = None, vision_config: Any = None, **outer: Any) -> None:
        super().__init__(**(outer | (text_config or {})))
        self.vision_config = DotsVisionConfig(**(vision_config or {}))


class DotsOCRForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = DotsOCRConfig

    def __init__(self, config: DotsOCRConfig) -> None:
        super().__init__(config)
        self.vision_tower = _Tower(config.vision_config)

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        images = _popped(inputs)
        if images:
            inputs["inputs_embeds"], input_ids = self._embedded(input_ids, **images), None
        return super().forward(input_ids, **inputs)

    def generate(self, input_ids: Any, **options: Any) -> Any:
        if not (images := _popped(options)):
            return super().generate(input_ids, **options)
        embeds = self._embedded(input_ids, **images)
        return torch.cat([input_ids, super().generate(inputs_embeds=embeds, **options)], 1)

    def _embedded(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        images = torch.cat(self.get_image_features(pixel_values, image_grid_thw).pooler_output)
        places = (input_ids == self.config.image_token_id)[..., None]
        return self.get_input_embeddings()(input_ids).masked_scatter(places, images)

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
        grids = image_grid_thw.tolist()
        found = [self.vision_tower(*each) for each in zip(parts, grids, strict=True)]
        return SimpleNamespace(pooler_output=found)


def _popped(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Takes what belongs to images out of the arguments."""
    names = ("pixel_values", "image_grid_thw")
    return {name: inputs.pop(name) for name in names if inputs.get(name) is not None}


class _Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width, size, eps = config.embed_dim, config.patch_size, config.rms_norm_eps
        patchifier = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, size, size), "norm": nn.RMSNorm(width, eps)}
        )
        self.patch_embed = nn.ModuleDict({"patchifier": patchifier})
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        if config.post_norm:
            self.post_trunk_norm = nn.RMSNorm(width, eps)
        merged = width * config.spatial_merge_size**2
        self.merger = nn.ModuleDict(
            {
                "ln_q": nn.LayerNorm(width, _MERGER_EPS),
                "mlp": nn.Sequential(
                    nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.hidden_size)
                ),
            }
        )

    def forward(self, pixels: Tensor, grid: list[int]) -> Any:
        """The embeddings of one image, whose patches follow one another square by square."""
        size, (_, rows, columns) = self.config.spatial_merge_size, grid
        embed: Any = self.patch_embed["patchifier"]
        x = embed["proj"](pixels.view(-1, 3, *embed["proj"].kernel_size)).flatten(1)
        x = embed["norm"](x)
        head_dim = x.shape[1] // self.config.num_attention_heads
        frequencies = _THETA ** -(torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
        angles = torch.tensor(
            [
                [row + down, column + right]
                for row in range(0, rows, size)
                for column in range(0, columns, size)
                for down in range(size)
                for right in range(size)
            ]
        )
        angles = (angles[..., None] * frequencies).flatten(1).repeat(1, 2)
        for block in self.blocks:
            x = block(x, angles)
        if self.config.post_norm:
            x = self.post_trunk_norm(x)
        return self.merger["mlp"](self.merger["ln_q"](x).view(-1, x.shape[1] * size**2))


class _Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner, bias = config.embed_dim, config.intermediate_size, config.use_bias
        self.num_heads = config.num_attention_heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width, bias), "proj": nn.Linear(width, width, bias)}
        )
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(width, inner, bias),
                "fc2": nn.Linear(inner, width, bias),
                "fc3": nn.Linear(width, inner, bias),
            }
        )

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        heads = self.attn["qkv"](self.norm1(x)).unflatten(1, (3, self.num_heads, -1))
        q, k, v = heads.permute(1, 2, 0, 3)
        q, k = _rotated(q, angles), _rotated(k, angles)
        read = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.attn["proj"](read.transpose(0, 1).flatten(1))
        normed = self.norm2(x)
        gated = F.silu(self.mlp["fc1"](normed)) * self.mlp["fc3"](normed)
        return x + self.mlp["fc2"](gated)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
