"""Random EAGLE-3 heads: their files, and the drafts of a reference of their own formulas.

The reference is written after Li et al., "EAGLE-3", 2025, section 3, and SafeAILab's published
code, with attention and norms of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.one_thread import one_thread
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


class EagleHead(torch.nn.Module):
    """A random head.

    Args:
        model: the model of transformers that it drafts for.
        kind: the family of its layer.
        num_drafted: the number of ids that it can draft.
        levels: behind how many layers it reads hidden states.
        has_table: whether it has embeddings of its own.
        options: further fields of config.json.
    """

    def __init__(
        self,
        model: Any,
        kind: str = "llama",
        num_drafted: int = 40,
        levels: tuple[int, ...] | None = None,
        has_table: bool = True,
        num_layers: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        make_config, make_layer, make_rope = LAYERS[kind]
        target = model.config
        torch.manual_seed(29)
        self.kind, self.options, self.levels = kind, options, levels
        self.config = config = make_config(
            vocab_size=target.vocab_size,
            hidden_size=options.pop("hidden_size", target.hidden_size),
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=80,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
        hidden, vocab = config.hidden_size, target.vocab_size
        depth = target.num_hidden_layers
        self.read = sorted(levels or (2, depth // 2, depth - 3))
        self.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.has_table = has_table
        width = len(self.read) * target.hidden_size
        self.fc = torch.nn.Linear(width, hidden, bias=False)
        self.input_norm = torch.nn.RMSNorm(width, 1e-5)
        self.layers = torch.nn.ModuleList(make_layer(config, i) for i in range(num_layers))
        self.rope: Any = make_rope(config)
        first: Any = self.layers[0]
        attention = first.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, torch.nn.Linear(2 * hidden, rows, bias=False))
        self.hidden_norm = torch.nn.RMSNorm(hidden, 1e-5)
        self.norm = torch.nn.RMSNorm(hidden, 1e-5)
        self.lm_head = torch.nn.Linear(hidden, num_drafted, bias=False)
        targets = torch.randperm(vocab)[:num_drafted].sort().values
        self.d2t = targets - torch.arange(num_drafted)
        self.targets = targets
        with torch.no_grad():
            for name, weight in self.named_parameters():
                is_norm = "norm" in name
                weight.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.08)
            if not has_table:
                self.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        self.eval()

    def save(self, directory: Path, form: str = "safe_ai_lab", verifier: str | None = None) -> Path:
        """Writes the files in the form of SafeAILab, or of the library "speculators", with the name
        of the model that it drafts for."""
        directory.mkdir()
        fields = self.config.to_dict()
        own = {"draft_vocab_size": len(self.targets), **self.options}
        if self.levels is not None:
            own["eagle_aux_hidden_state_layer_ids"] = list(self.levels)
        if form == "speculators":
            found: dict[str, Any] = {"architectures": ["Eagle3DraftModel"]}
            found["speculators_model_type"] = "eagle3"
            found |= own | {"transformer_layer_config": fields}
            found["speculators_config"] = {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}],
                "verifier": {"name_or_path": verifier, "architectures": []},
            }
        else:
            name = "LlamaForCausalLMEagle3" if self.kind == "llama" else "Eagle3Qwen3ForCausalLM"
            found = fields | own | {"architectures": [name], "tie_word_embeddings": False}
        (directory / "config.json").write_text(json.dumps(found))
        first = "midlayer" if form == "safe_ai_lab" and len(self.layers) == 1 else "layers.0"
        weights = {"d2t": self.d2t, "t2d": torch.zeros(self.config.vocab_size, dtype=torch.bool)}
        for name, weight in self.state_dict().items():
            if name.startswith("input_norm") and not self.options.get("norm_before_fc"):
                continue
            if name.startswith("embed_tokens") and not self.has_table:
                continue
            name = name.replace("hidden_norm", "layers.0.hidden_norm")
            weights[name.replace("layers.0", first)] = weight.contiguous()
        save_file(weights, directory / "model.safetensors")
        return directory

    def _run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The result behind the last layer for tokens, [n], with hidden states, [n, hidden]."""
        positions = torch.arange(len(tokens))[None]
        first: Any = self.layers[0]
        embeds = first.input_layernorm(self.embed_tokens(tokens)[None])
        stream = hidden[None]
        normed = self.hidden_norm(stream)
        if self.options.get("norm_before_residual"):
            stream = normed
        angles = self.rope(stream, positions)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        common = {"position_embeddings": angles, "attention_mask": mask}
        both = torch.cat((embeds, normed), -1)
        stream = stream + first.self_attn(both, **common)[0]
        stream = stream + first.mlp(first.post_attention_layernorm(stream))
        for layer in list(self.layers)[1:]:
            after = layer(stream, **common)
            stream = after[0] if isinstance(after, tuple) else after
        out: Tensor = self.norm(stream)[0] if self.options.get("norm_output") else stream[0]
        return out

    def _logits(self, states: Tensor) -> Tensor:
        if not self.options.get("norm_output"):
            states = self.norm(states)
        logits: Tensor = self.lm_head(states)
        return logits

    @one_thread()
    @torch.inference_mode()
    def drafts(self, model: Any, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts behind tokens of which the model has computed all but the last one.

        Returns:
            The drafts, and by how much their logits are ahead of the others at least.
        """
        given = torch.tensor([token_ids[:-1]])
        every = model(given, output_hidden_states=True).hidden_states
        sources = torch.cat([every[level][0] for level in self.read], -1)
        if self.options.get("norm_before_fc"):
            sources = self.input_norm(sources)
        states, tokens = self.fc(sources), list(token_ids[1:])
        found, margin = [], torch.inf
        for _ in range(count):
            after = self._run(states, torch.tensor(tokens))
            logits = self._logits(after[-1])
            best = logits.topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            found.append(int(self.targets[logits.argmax()]))
            states = torch.cat((states, after[-1:]))
            tokens.append(found[-1])
        return found, margin
