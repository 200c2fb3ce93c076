"""Random DFlash heads: their files, and the drafts of a reference of their own formulas.

The reference is written after "DFlash: Block Diffusion for Flash Speculative Decoding", 2026, and
the code of the library speculators, with the modules of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.draft_heads import HEADS, initialize, with_margin
from support.one_thread import one_thread
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class BlockHead(torch.nn.Module):
    """A random head.

    Args:
        model: the model of transformers that it drafts for.
        num_drafted: the number of ids that it can draft; None: all, by the LM head of the model.
        layers: the numbers of the layers whose results it reads, from 0 on.
        has_table: whether it has embeddings of its own.
        num_layers: the number of its layers.
    """

    mask_token = 11

    def __init__(
        self,
        model: Any,
        num_drafted: int | None = None,
        layers: tuple[int, ...] = (0, 3),
        has_table: bool = False,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        target = model.config
        torch.manual_seed(37)
        hidden, vocab = target.hidden_size, target.vocab_size
        self.read, self.has_table, self.num_drafted = layers, has_table, num_drafted
        self.config = config = Qwen3Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=num_layers,
            **HEADS[0],
            intermediate_size=80,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
        self.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.fc = torch.nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.hidden_norm = torch.nn.RMSNorm(hidden, 1e-5)
        self.layers = torch.nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(num_layers))
        self.rope = Qwen3RotaryEmbedding(config)
        self.norm = torch.nn.RMSNorm(hidden, 1e-5)
        self.lm_head = torch.nn.Linear(hidden, num_drafted or vocab, bias=False)
        self.targets = torch.randperm(vocab)[: num_drafted or vocab].sort().values
        initialize(self)
        if not has_table:
            self.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
        if num_drafted is None:
            self.lm_head.weight.data.copy_(model.lm_head.weight)

    def save(self, directory: Path, form: str = "z_lab", verifier: str | None = None) -> Path:
        """Writes the files in the form of its authors, or of the library "speculators"."""
        directory.mkdir()
        fields = self.config.to_dict()
        if form == "z_lab":
            inner = {"mask_token_id": self.mask_token, "target_layer_ids": list(self.read)}
            found = fields | {"dflash_config": inner, "block_size": 16}
            found["architectures"] = ["DFlashDraftModel"]
        else:
            found = {
                "architectures": ["DFlashDraftModel"],
                "speculators_model_type": "dflash",
                "transformer_layer_config": fields,
                "mask_token_id": self.mask_token,
                "aux_hidden_state_layer_ids": [each + 1 for each in self.read],
                "block_size": 8,
                "sliding_window_non_causal": False,
            }
        if self.num_drafted is not None:
            found["draft_vocab_size"] = self.num_drafted
        (directory / "config.json").write_text(json.dumps(found))
        left_out = {"lm_head": self.num_drafted is not None, "embed_tokens": self.has_table}
        weights = {
            name: weight.contiguous()
            for name, weight in self.state_dict().items()
            if left_out.get(name.removesuffix(".weight"), True)
        }
        if self.num_drafted is not None:
            weights["d2t"] = self.targets - torch.arange(self.num_drafted)
        save_file(weights, directory / "model.safetensors")
        return directory

    def _attend(self, attention: Any, stream: Tensor, context: Tensor) -> Tensor:
        """The attention of a block, [n, hidden], to what is before it, [m, hidden], and itself."""
        heads, count = (-1, attention.head_dim), len(context) + len(stream)
        both = torch.cat((context, stream))
        query = attention.q_norm(attention.q_proj(stream).unflatten(-1, heads))
        keys = attention.k_norm(attention.k_proj(both).unflatten(-1, heads))
        values = attention.v_proj(both).unflatten(-1, heads)
        cos, sin = self.rope(stream[None], torch.arange(count)[None])
        own = slice(len(context), None)
        query, _ = apply_rotary_pos_emb(query, query, cos[0][own], sin[0][own])
        keys, _ = apply_rotary_pos_emb(keys, keys, cos[0], sin[0])
        groups = query.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * attention.scaling
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        out: Tensor = attention.o_proj(mixed.flatten(1))
        return out

    @one_thread()
    @torch.inference_mode()
    def drafts(self, model: Any, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts behind tokens of which the model has computed all but the last one.

        Returns:
            The drafts, and by how much their logits are ahead of the others at least.
        """
        given = torch.tensor([token_ids[:-1]])
        every = model(given, output_hidden_states=True).hidden_states
        context = self.hidden_norm(self.fc(torch.cat([every[i + 1][0] for i in self.read], -1)))
        block = torch.tensor([token_ids[-1], *[self.mask_token] * count])
        stream = self.embed_tokens(block)
        for layer in self.layers:
            own: Any = layer
            stream = stream + self._attend(own.self_attn, own.input_layernorm(stream), context)
            stream = stream + own.mlp(own.post_attention_layernorm(stream))
        return with_margin(self.lm_head(self.norm(stream))[1:], self.targets)
