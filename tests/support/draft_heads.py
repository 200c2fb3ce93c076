"""Random EAGLE heads: their files, and the drafts of a reference of their own formulas.

The reference is written after Li et al., "EAGLE", 2024, and "EAGLE-3", 2025, section 3, and
SafeAILab's published code, with attention and norms of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.one_thread import one_thread
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}

HEADS: list[dict[str, int]] = [
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    {"num_attention_heads": 3, "num_key_value_heads": 1},
]
"""The heads of layers whose width follows from their number, or does not."""


def initialize(head: torch.nn.Module) -> None:
    """Makes the weights of a head random."""
    with torch.no_grad():
        for name, weight in head.named_parameters():
            is_norm = "norm" in name
            weight.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.08)
    head.eval()


def with_margin(logits: Tensor, targets: Tensor) -> tuple[list[int], float]:
    """The tokens with the largest logits, [rows, drafted ids], and by how much these are ahead of
    the others at least."""
    best = logits.topk(2).values
    return targets[logits.argmax(-1)].tolist(), float((best[:, 0] - best[:, 1]).min())


class Drafting(torch.nn.Module):
    """What all random heads share: layers of transformers that are run by themselves, and drafts
    one after the other.

    Attributes:
        layers: the layers.
        rope: their rotary embedding.
        targets: [drafted ids], the token ids.
    """

    layers: torch.nn.ModuleList
    targets: Tensor

    def _states(self, every: Any) -> Tensor:
        """The hidden states, [n, hidden], that tokens are joined with, from those of the model:
        its embeddings and what is behind each layer, the last one behind the final norm."""
        raise NotImplementedError

    def _run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The result behind the last layer for tokens, [n], with hidden states, [n, hidden]."""
        raise NotImplementedError

    def _logits(self, model: Any, states: Tensor) -> Tensor:
        raise NotImplementedError

    def _common(self, stream: Tensor) -> dict[str, Any]:
        """What all layers get beside the residual stream, [1, n, hidden]."""
        size = stream.shape[1]
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        rope: Any = self.rope
        angles = rope(stream, torch.arange(size)[None])
        return {"position_embeddings": angles, "attention_mask": mask}

    @one_thread()
    @torch.inference_mode()
    def drafts(self, model: Any, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts behind tokens of which the model has computed all but the last one.

        Returns:
            The drafts, and by how much their logits are ahead of the others at least.
        """
        given = torch.tensor([token_ids[:-1]])
        every = model(given, output_hidden_states=True).hidden_states
        states, tokens = self._states(every), list(token_ids[1:])
        found: list[int] = []
        margin = torch.inf
        masks: Any = self._masks(count - 1)
        for number in range(count):
            after = self._run(states, torch.tensor(tokens))
            drafted, ahead = with_margin(self._logits(model, after[-1:]), self.targets)
            found, margin = found + drafted, min(margin, ahead)
            ids, given = (found, after[-1:]) if masks is None else (masks[0], masks[1][number:][:1])
            states = torch.cat((states, given))
            tokens += ids[-1:]
        return found, margin

    def _masks(self, count: int) -> tuple[list[int], Tensor] | None:
        """What stands for so many tokens that are not known, and for their hidden states, [count,
        hidden]; None: each draft reads the one before."""
        return None


class FirstEagleHead(Drafting):
    """A random head of EAGLE 1 or 2, whose LM head is the model's.

    Args:
        model: the model of transformers that it drafts for.
        kind: the family of its layer.
        has_table: whether it has embeddings of its own.
        has_head: whether it has an LM head of its own.
        bias: whether its projection has a bias.
        num_layers: the number of its layers.
    """

    def __init__(
        self,
        model: Any,
        kind: str = "llama",
        has_table: bool = True,
        has_head: bool = False,
        bias: bool = False,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        make_config, make_layer, make_rope = LAYERS[kind]
        torch.manual_seed(31)
        vocab, hidden = model.config.vocab_size, model.config.hidden_size
        self.kind, self.has_table, self.has_head = kind, has_table, has_head
        self.config = config = make_config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=num_layers,
            **HEADS[kind == "qwen2"],
            intermediate_size=80,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
        self.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=bias)
        self.layers = torch.nn.ModuleList(make_layer(config, i) for i in range(num_layers))
        self.layers[0].input_layernorm = torch.nn.Identity()
        self.rope = make_rope(config)
        self.lm_head = torch.nn.Linear(hidden, vocab, bias=False)
        self.targets = torch.arange(vocab)
        initialize(self)
        if not has_table:
            self.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)

    def save(self, directory: Path, form: str = "named") -> Path:
        """Writes the files in the form of vLLM's "eagle" configurations, with the architecture's
        name of vLLM, "named", or with that of the layer, "plain", as SafeAILab does."""
        directory.mkdir()
        fields = self.config.to_dict()
        plain = f"{self.kind.capitalize()}ForCausalLM"
        names = {"eagle": f"Eagle{plain}", "named": f"{plain}Eagle", "plain": plain}
        if form == "eagle":
            found = {"model_type": "eagle", "model": {**fields, "architectures": [plain]}}
        else:
            found = fields | {"tie_word_embeddings": True}
        (directory / "config.json").write_text(json.dumps(found | {"architectures": [names[form]]}))
        left_out = {"lm_head": self.has_head, "embed_tokens": self.has_table}
        weights = {
            name: weight.contiguous()
            for name, weight in self.state_dict().items()
            if left_out.get(name.removesuffix(".weight"), True)
        }
        save_file(weights, directory / "model.safetensors")
        return directory

    def _states(self, every: Any) -> Tensor:
        states: Tensor = every[-1][0]
        return states

    def _run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        stream = self.fc(torch.cat((self.embed_tokens(tokens), hidden), -1))[None]
        common = self._common(stream)
        for layer in self.layers:
            stream = layer(stream, **common)
        out: Tensor = stream[0]
        return out

    def _logits(self, model: Any, states: Tensor) -> Tensor:
        logits: Tensor = (self.lm_head if self.has_head else model.lm_head)(states)
        return logits


class EagleHead(Drafting):
    """A random head of EAGLE-3.

    Args:
        model: the model of transformers that it drafts for.
        kind: the family of its layer.
        num_drafted: the number of ids that it can draft.
        mask_token: the token that stands for those that are not known, of P-EAGLE.
        levels: behind how many layers it reads hidden states; empty: it reads that behind the final
            norm.
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
        mask_token: int | None = None,
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
            **HEADS[0],
            intermediate_size=80,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
        hidden, vocab = config.hidden_size, target.vocab_size
        depth = target.num_hidden_layers
        self.read = sorted((2, depth // 2, depth - 3) if levels is None else levels)
        self.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.has_table = has_table
        width = len(self.read) * target.hidden_size
        if width:
            self.fc = torch.nn.Linear(width, hidden, bias=False)
            self.input_norm = torch.nn.RMSNorm(width, 1e-5)
        self.mask_token = mask_token
        if mask_token is not None:
            self.mask_hidden = torch.nn.Parameter(torch.empty(1, 1, width or hidden))
        self.fc_norm = torch.nn.ModuleList(
            torch.nn.RMSNorm(target.hidden_size, 1e-5)
            for _ in range(len(self.read) * options.get("fc_norm", False))
        )
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
        initialize(self)
        if not has_table:
            self.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)

    def save(self, directory: Path, form: str = "safe_ai_lab", verifier: str | None = None) -> Path:
        """Writes the files in the form of SafeAILab, or of the library "speculators", with the name
        of the model that it drafts for."""
        directory.mkdir()
        fields = self.config.to_dict()
        own = {"draft_vocab_size": len(self.targets), **self.options}
        if self.mask_token is not None:
            own["mask_token_id" if form == "speculators" else "ptd_token_id"] = self.mask_token
        if self.levels == ():
            own["eagle_config"] = {"use_aux_hidden_state": False}
        elif self.levels is not None:
            own["eagle_aux_hidden_state_layer_ids"] = list(self.levels)
        if form == "speculators":
            found: dict[str, Any] = {"architectures": ["Eagle3DraftModel"]}
            found["speculators_model_type"] = "eagle3" if self.mask_token is None else "peagle"
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
        if self.mask_token is not None and form == "safe_ai_lab":
            weights["mask_hidden"] = self.mask_hidden.detach()[0].contiguous()
        save_file(weights, directory / "model.safetensors")
        return directory

    def _states(self, every: Any) -> Tensor:
        last: Tensor = every[-1][0]
        return self._combine([every[level][0] for level in self.read]) if self.read else last

    def _combine(self, states: list[Tensor]) -> Tensor:
        if self.options.get("norm_before_fc"):
            joined = self.input_norm(torch.cat(states, -1))
            states = list(joined.split(joined.shape[-1] // len(states), -1))
        if self.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        combined: Tensor = self.fc(torch.cat(states, -1))
        return combined

    def _masks(self, count: int) -> tuple[list[int], Tensor] | None:
        if self.mask_token is None:
            return None
        parts = self.mask_hidden[0].chunk(max(len(self.read), 1), -1)
        state = self._combine(list(parts)) if self.read else parts[0]
        return [self.mask_token] * count, state.expand(count, -1)

    def _run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        first: Any = self.layers[0]
        embeds = first.input_layernorm(self.embed_tokens(tokens)[None])
        stream = hidden[None]
        normed = self.hidden_norm(stream)
        if self.options.get("norm_before_residual"):
            stream = normed
        common = self._common(stream)
        both = torch.cat((embeds, normed), -1)
        stream = stream + first.self_attn(both, **common)[0]
        stream = stream + first.mlp(first.post_attention_layernorm(stream))
        for layer in list(self.layers)[1:]:
            stream = layer(stream, **common)
        out: Tensor = self.norm(stream)[0] if self.options.get("norm_output") else stream[0]
        return out

    def _logits(self, model: Any, states: Tensor) -> Tensor:
        if not self.options.get("norm_output"):
            states = self.norm(states)
        logits: Tensor = self.lm_head(states)
        return logits
