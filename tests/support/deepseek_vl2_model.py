"""DeepSeek-VL2, which transformers does not have, of modules of transformers: SigLIP and a language
model. What is between both is its authors' formula, in operations of torch. The model writes files
as the authors publish them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.published_deepseek import OF_PROCESSOR
from torch import Tensor, nn
from transformers import (
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

_FACTOR = 2
_TILES = [[64, 64], [64, 128], [128, 64], [128, 128], [192, 64]]
_SMALL = {"hidden_size": 16, "num_attention_heads": 1, "mlp_dim": 16}
_TINY_TOWER = {
    "sam_config": {"num_hidden_layers": 1, "output_channels": 8, "downsample_channels": [8, 16]}
    | _SMALL,
    "encoder_config": {"num_hidden_layers": 1, "intermediate_size": 16, "num_key_value_heads": 1}
    | _SMALL,
}
"""Of a model whose language model alone is needed."""
_RENAMED = {
    "embeddings.patch_embedding.": "patch_embed.proj.",
    "embeddings.position_embedding.weight": "pos_embed",
    "encoder.layers.": "blocks.",
    "post_layernorm.": "norm.",
    ".layer_norm": ".norm",
    ".self_attn.out_proj.": ".attn.proj.",
}


class DeepseekVL2Config(SimpleNamespace):
    """The fields of config.json, with those of its parts under transformers' names."""

    def __init__(self, *, text_config: Any, vision_config: Any, **outer: Any) -> None:
        text = {name: value for name, value in text_config.items() if name != "model_type"}
        text.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", False))
        super().__init__(text=text, vision=dict(vision_config), **outer)


def _language_model(text: dict[str, Any]) -> Any:
    num_dense = text["first_k_dense_replace"]
    num_sparse = text["num_hidden_layers"] - num_dense
    kinds = ["dense"] * num_dense + ["sparse"] * num_sparse
    if not text.get("use_mla", True):
        config = DeepseekOcr2Config(
            text_config=text | {"mlp_layer_types": kinds},
            vision_config=_TINY_TOWER,
            tie_word_embeddings=text["tie_word_embeddings"],
        )
        return DeepseekOcr2ForConditionalGeneration(config)
    if text["topk_method"] == "noaux_tc":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**text))
    return DeepseekV2ForCausalLM(DeepseekV2Config(**text))


class DeepseekVL2ForConditionalGeneration(nn.Module):
    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__()
        self.config = config
        vision = config.vision
        width, hidden = vision["width"], config.text["hidden_size"]
        self.vision = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=width,
                intermediate_size=int(width * vision["mlp_ratio"]),
                num_hidden_layers=vision["layers"],
                num_attention_heads=vision["heads"],
                image_size=vision["image_size"],
                patch_size=vision["patch_size"],
                vision_use_head=False,
            )
        )
        self.projector = nn.Sequential(
            nn.Linear(width * _FACTOR**2, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.image_newline = nn.Parameter(torch.empty(hidden))
        self.view_seperator = nn.Parameter(torch.empty(hidden))
        self.language = _language_model(config.text)

    @property
    def generation_config(self) -> Any:
        return self.language.generation_config

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        return self.language(inputs_embeds=self._embedded(input_ids, **inputs))

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        inputs = {name: options.pop(name) for name in ("pixel_values", "grids") if name in options}
        embeds = self._embedded(input_ids, **inputs)
        return torch.cat([input_ids, self.language.generate(inputs_embeds=embeds, **options)], 1)

    def _embedded(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, grids: Tensor | None = None
    ) -> Tensor:
        embeds: Tensor = self.language.get_input_embeddings()(input_ids)
        if pixel_values is None or grids is None:
            return embeds
        images = torch.cat(self.get_image_features(pixel_values, grids).pooler_output)
        places = (input_ids == self.config.image_token_id)[..., None]
        return embeds.masked_scatter(places, images)

    def get_image_features(self, pixel_values: Tensor, grids: Tensor) -> Any:
        """The embeddings of images, each of which has its tiles, the whole first."""
        found = []
        for tiles, (_, rows, columns) in zip(
            pixel_values.split(grids[:, 0].tolist()), grids.tolist(), strict=True
        ):
            features = self.vision(tiles).last_hidden_state
            side = int(features.shape[1] ** 0.5)
            squares = features.transpose(1, 2).unflatten(2, (side, side))
            rest = -side % _FACTOR
            unfolded = F.unfold(F.pad(squares, (0, rest, 0, rest)), _FACTOR, stride=_FACTOR)
            embeds = self.projector(unfolded.transpose(1, 2))
            side = (side + rest) // _FACTOR
            whole, *pictures = embeds.unflatten(1, (side, side))
            lines = [torch.cat(pictures[row * columns :][:columns], 1) for row in range(rows)]
            parts = [self._with_ends(whole), self.view_seperator[None]]
            found.append(torch.cat([*parts, self._with_ends(torch.cat(lines))]))
        return SimpleNamespace(pooler_output=found)

    def _with_ends(self, picture: Tensor) -> Tensor:
        return torch.cat([torch.cat([row, self.image_newline[None]]) for row in picture])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights in memory, under names of the authors."""
        text = {f"language.{name}": each for name, each in self._text(super().state_dict()).items()}
        return text | self._published_tower()

    def _text(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the language model; that of DeepSeek-OCR 2 has a tower beside it."""
        prefix = "language."
        own = {n.removeprefix(prefix): each for n, each in weights.items() if n.startswith(prefix)}
        if isinstance(self.language, DeepseekOcr2ForConditionalGeneration):
            inner = "model.language_model."
            head = {"lm_head.weight": own["lm_head.weight"]}
            own = {
                n.replace(inner, "model."): each for n, each in own.items() if n.startswith(inner)
            }
            own |= head
        return own

    def _published_tower(self) -> dict[str, Tensor]:
        found = {
            "image_newline": self.image_newline.data,
            "view_seperator": self.view_seperator.data,
        }
        found |= {f"projector.layers.{n}": each for n, each in self.projector.state_dict().items()}
        weights = self.vision.state_dict()
        for name, tensor in weights.items():
            name = name.removeprefix("vision_model.")
            if ".k_proj." in name or ".v_proj." in name:
                continue
            if ".q_proj." in name:
                rows = [weights[name.replace(".q_", f".{each}_")] for each in "qkv"]
                tensor, name = torch.cat(rows), name.replace(".self_attn.q_proj.", ".attn.qkv.")
            for part, own in _RENAMED.items():
                name = name.replace(part, own)
            found[f"vision.{name}"] = tensor[None] if name == "pos_embed" else tensor
        return found

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            self.language.save_pretrained(scratch)
            stored = load_file(Path(scratch) / "model.safetensors")
        text = {
            f"language.{name}": each
            for name, each in stored.items()
            if name.startswith(("model.embed_tokens", "model.layers", "model.norm", "lm_head"))
        }
        unused = {"vision.attn_pool.latent": torch.ones(1, 1, self.config.vision["width"])}
        save_file(text | self._published_tower() | unused, directory / "model.safetensors")
        config, hidden = self.config, self.config.text["hidden_size"]
        whole = {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "candidate_resolutions": _TILES,
            "global_view_pos": "head",
            "image_token_id": config.image_token_id,  # of files without a tokenizer
            "language_config": config.text | {"model_type": "deepseek_v2"},
            "model_type": "deepseek_vl_v2",
            "projector_config": {
                "input_dim": config.vision["width"],
                "model_type": "mlp_projector",
                "n_embed": hidden,
            },
            "tile_tag": "2D",
            "torch_dtype": "float32",
            "vision_config": config.vision,
        }
        (directory / "config.json").write_text(json.dumps(whole))
        own = OF_PROCESSOR | {"candidate_resolutions": _TILES, "downsample_ratio": _FACTOR}
        own |= {"patch_size": config.vision["patch_size"]}
        (directory / "processor_config.json").write_text(json.dumps(own))
