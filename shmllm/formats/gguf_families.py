"""The families of models in GGUF files that run, and how such a file stores their tensors.

The names on one side are llama.cpp's, on the other transformers'. This module must not know the
fields of config.json, nor import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shmllm.formats.gguf import GgufHeader, shown

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CHECKPOINT_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.\w+")
_NUM_HEADS = {"q": "attention.head_count", "k": "attention.head_count_kv"}
_NORM = re.compile(r".*norm\.weight")
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = _ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _DENSE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = _ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = _EXPERTS | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A family of models in GGUF files.

    Attributes:
        title: its name for people.
        architecture: transformers' class.
        model_type: transformers' model type.
        modules: for each module of a layer in the file the one in a checkpoint. A name with ``{}``
            stands for all experts, which the file has in one tensor.
        is_permuted: whether the rows of queries and keys are in llama.cpp's order, in which it
            rotates neighbouring rows of a head together; transformers rotates the two halves.
        norm_offset: what the file's weights of norms have more than a checkpoint's.
        also: further classes of transformers whose models are stored in the same way.
    """

    title: str
    architecture: str
    model_type: str
    modules: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    also: tuple[str, ...] = ()

    def checkpoint_name(self, name: str) -> str:
        """Returns a tensor's name in a checkpoint, with ``{}`` for the number of an expert; the
        same name if there is none."""
        found = _LAYER.fullmatch(name)
        if found is not None:
            layer, module, kind = found.groups()
            known = self.modules.get(module)
            return f"model.layers.{layer}.{known}.{kind}" if known else name
        module, _, kind = name.partition(".")
        return f"{_OUTSIDE[module]}.{kind}" if module in _OUTSIDE else name

    def stored_name(self, name: str) -> tuple[str, int] | None:
        """Returns the name in a file of a checkpoint's tensor, and the number of the expert that it
        belongs to, 0 without experts; None: a file has no such tensor."""
        found = _CHECKPOINT_LAYER.fullmatch(name)
        if found is None:
            module, _, kind = name.rpartition(".")
            stored = _key_of(_OUTSIDE, module)
            return (f"{stored}.{kind}", 0) if stored else None
        layer, module, kind = found.groups()
        expert = _EXPERT.search(module)
        stored = _key_of(self.modules, _EXPERT.sub("{}", module))
        number = int(expert[0]) if expert else 0
        return (f"blk.{layer}.{stored}.{kind}", number) if stored else None

    def heads_key(self, stored: str) -> str | None:
        """Returns the key, below the architecture's prefix, of the number of heads whose rows are
        permuted in a tensor of a file; None: its rows are in a checkpoint's order."""
        found = _PERMUTED.fullmatch(stored) if self.is_permuted else None
        return _NUM_HEADS[found[1]] if found else None

    def offset(self, stored: str) -> float:
        """Returns what the values of a tensor of a file have more than a checkpoint's."""
        return self.norm_offset if _NORM.fullmatch(stored) else 0.0


def _key_of(table: Mapping[str, str], value: str) -> str | None:
    return next((key for key, known in table.items() if known == value), None)


FAMILIES: dict[tuple[str, bool], GgufFamily] = {
    ("llama", False): GgufFamily(
        title="Llama and Mistral",
        architecture="LlamaForCausalLM",
        model_type="llama",
        modules=_DENSE,
        is_permuted=True,
        also=("MistralForCausalLM",),
    ),
    ("llama", True): GgufFamily(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        modules=_MIXTRAL,
        is_permuted=True,
    ),
    ("qwen2", False): GgufFamily(
        title="Qwen 2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        modules=_DENSE,
    ),
    ("qwen3", False): GgufFamily(
        title="Qwen 3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        modules=_DENSE,
    ),
    ("qwen3moe", True): GgufFamily(
        title="Qwen 3 MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        modules=_EXPERTS,
    ),
    ("gemma2", False): GgufFamily(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        modules=_GEMMA,
        norm_offset=1.0,
    ),
    ("gemma3", False): GgufFamily(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        modules=_GEMMA,
        norm_offset=1.0,
    ),
}
"""The families by llama.cpp's architecture, and whether the model has experts."""


def family_of(header: GgufHeader) -> GgufFamily:
    """Returns the family of a file's model.

    Raises:
        EngineStartError: the file has another model; the message names those that run.
    """
    name = header.architecture
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    if (name, has_experts) in FAMILIES:
        return FAMILIES[name, has_experts]
    kind = " with experts" if has_experts and (name, False) in FAMILIES else ""
    raise header.error(
        f"architecture {shown(name)}{kind} is not supported; supported: "
        f"{', '.join(dict.fromkeys(known for known, _ in FAMILIES))} "
        f"({', '.join(family.title for family in FAMILIES.values())})"
    )


def family_of_class(architecture: str) -> tuple[str, GgufFamily] | None:
    """Returns llama.cpp's architecture and the family of one of transformers' classes; None if no
    file can have such a model."""
    for (name, _), family in FAMILIES.items():
        if architecture in (family.architecture, *family.also):
            return name, family
    return None
