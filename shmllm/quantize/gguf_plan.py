"""The tensors of a GGUF file that is to be written: their types, and the checkpoint's for each.

All matrices get the type of the format, the embedding table included, as `llama-quantize --pure`
does it. Norms, biases and routers are F32, and a matrix whose rows are no multiple of a block
becomes F16. A tied model has no tensor for its LM head. This module must not know the metadata's
keys.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from shmllm.errors import QuantizeError
from shmllm.formats.gguf_family import GgufFamily, Place, is_tensor
from shmllm.models.gguf_tensors import of_place
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, LatentAttentionSpec
from shmllm.models.recurrent_specs import Mamba2Spec, MambaSpec, ShortConvolutionSpec
from shmllm.models.specs import MoESpec
from shmllm.quantize.gguf_description import rope_tensors
from shmllm.quantize.source import Source, SourceTensor

_UNROUNDED = (".ffn_gate_inp.", ".shortconv.conv.", ".ssm_conv1d.", "position_embd.", "_norm.")
"""Parts of the names of what llama.cpp has in F32: routers, convolutions, learned positions, norms.
What is no weight is so, too."""
_OF_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_OF_MIXER: Mapping[type[Any], tuple[str, ...]] = {
    AttentionSpec: _OF_ATTENTION,
    LatentAttentionSpec: _OF_ATTENTION,
    ShortConvolutionSpec: ("shortconv.",),
    MambaSpec: ("ssm_",),
    Mamba2Spec: ("ssm_",),
}
_OF_MLP = ("ffn_gate.", "ffn_up.", "ffn_down.")
_QK_NORMS = ("attn_q_norm", "attn_k_norm")
_OF_EXPERTS = ("ffn_gate_inp", "exp_probs_b", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_OF_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")


@dataclass(slots=True)
class Planned:
    """A tensor of the file.

    Attributes:
        name: its name.
        kind: how it is stored.
        place: where the checkpoint has it.
        parts: the checkpoint's tensors by the number of the expert, or one of them.
        num_rows: see `of_place`.
        heads: the numbers of heads whose rows have another order; empty if they have not.
        offset: what is added to its values.
    """

    name: str
    kind: Kind
    place: Place
    num_rows: int
    heads: tuple[int, ...]
    offset: float
    parts: dict[int, SourceTensor] = field(default_factory=dict)

    @property
    def is_of_experts(self) -> bool:
        """Whether the checkpoint has a tensor for each expert."""
        return "{}" in self.place.name

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _shape(self.parts[0], self.place, self.num_rows)
        return (len(self.parts), *shape) if self.is_of_experts else shape

    @property
    def num_bytes(self) -> int:
        num_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // num_elements * block_bytes


def plan(
    source: Source,
    tensors: list[SourceTensor],
    family: GgufFamily,
    values: Mapping[str, Any],
    architecture: str,
    kind: Kind,
) -> list[Planned]:
    """The tensors of the file, in the order in which they are written."""
    planned: dict[str, Planned] = {}
    known = _known_names(architecture, source.config.num_layers)
    _check_rope(source, known, family)
    for tensor in tensors:
        if tensor.name is None:
            continue
        found = family.stored_names(tensor.name)
        if not found or not known.issuperset(map(_module_of, (name for name, _, _ in found))):
            raise QuantizeError(
                f"{tensor.file.path}: {tensor.stored} has no name in a GGUF file of {family.title}"
            )
        for name, expert, place in found:
            heads = tuple(
                _of_layer(values[f"{architecture}.{key}"], name) for key in family.heads_keys(name)
            )
            num_rows = values[f"{architecture}.{place.num_rows}"] if place.num_rows else 0
            chosen = _kind_of(name, _shape(tensor, place, num_rows), kind)
            one = Planned(name, chosen, place, num_rows, heads, family.offset(name))
            planned.setdefault(name, one).parts[expert] = tensor
    _check_complete(source, planned, family)
    return list(planned.values())


def _check_rope(source: Source, known: Container[str], family: GgufFamily) -> None:
    """Raises QuantizeError if the rotary embedding needs a tensor that llama.cpp does not have."""
    for name in rope_tensors(source.config):
        if _module_of(name) not in known:
            raise QuantizeError(
                f"{source.directory}: no tensor {_module_of(name)} in a GGUF file of "
                f"{family.title}, which the rotary embedding needs"
            )


def _shape(tensor: SourceTensor, place: Place, num_rows: int) -> tuple[int, ...]:
    """The shape in the file."""
    return tuple(of_place(torch.empty(tensor.shape, device="meta"), place, num_rows).shape)


def _of_layer(value: Any, name: str) -> Any:
    """The value for the layer of a tensor, where layers differ."""
    return value[int(name.split(".")[1])] if isinstance(value, list) else value


def _module_of(name: str) -> str:
    """The name of a tensor without its kind, which that of few lacks."""
    return name.removesuffix(".weight").removesuffix(".bias")


def _known_names(architecture: str, num_layers: int) -> set[str]:
    """The names of all tensors that llama.cpp has for an architecture, without ".weight"."""
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    forms = [gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[kind]]
    return {form.format(bid=layer) for form in forms for layer in range(num_layers)}


def _kind_of(name: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    is_weight = name.endswith(".weight") and len(shape) > 1
    if not is_weight or any(part in name for part in _UNROUNDED):
        return Kind.F32
    return Kind.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _check_complete(source: Source, planned: Mapping[str, Planned], family: GgufFamily) -> None:
    """Raises QuantizeError if the checkpoint lacks a tensor that the model needs."""
    config = source.config
    if config.tie_word_embeddings and family.needs_head:
        raise QuantizeError(
            f"{source.directory}: the LM head shares the embedding table, and llama.cpp reads no "
            f"such file of {family.title}"
        )
    skipped = {"output"} if config.tie_word_embeddings else set()
    needed = [f"{module}.weight" for module in family.outside if module not in skipped]
    modules = family.written_modules
    if config.layers[0].norms.before_mlp is None:  # one norm for attention and MLP
        modules.discard("ffn_norm")
    endings = {name if is_tensor(name) else f"{name}.weight" for name in modules}
    endings |= {name.split(".", 2)[2] for name in planned if name.startswith("blk.")}
    for layer, spec in enumerate(config.layers):
        own = [ending for ending in sorted(endings) if not ending.startswith(_absent(spec))]
        needed += [f"blk.{layer}.{ending}" for ending in own]
    missing = [name for name in needed if name not in planned]
    for mixture in config.mixtures:
        of_experts = [each for each in planned.values() if each.is_of_experts]
        missing += [each.name for each in of_experts if len(each.parts) != mixture.num_experts]
    if missing:
        name = family.place(missing[0]).name
        raise QuantizeError(f"{source.directory} is not complete: it has no {name}")


def _absent(layer: LayerSpec) -> tuple[str, ...]:
    """What the names of those tensors begin with that a layer lacks beside others of its model."""
    own = _OF_MIXER[type(layer.mixer)]
    mixer = tuple({name for names in _OF_MIXER.values() for name in names} - {*own})
    if isinstance(layer.mixer, AttentionSpec) and layer.mixer.qk_norm is None:
        mixer += _QK_NORMS
    if not isinstance(layer.mlp, MoESpec):
        return mixer + _OF_EXPERTS + _OF_SHARED
    return mixer + _OF_MLP + (() if layer.mlp.shared else _OF_SHARED)
