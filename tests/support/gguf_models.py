"""Small GGUF files, written by the `gguf` package as llama.cpp's conversion writes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from support.gguf_family_sizes import LATENTS, has_experts, heads_of_layers
from support.gguf_sizes import add_sizes, num_kv_heads
from transformers import PreTrainedModel

from shmllm.frontend.model_files import resolve_model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "phi": gguf.MODEL_ARCH.PHI2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    **dict.fromkeys(LATENTS, gguf.MODEL_ARCH.DEEPSEEK2),
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2,
    "bailing_moe": gguf.MODEL_ARCH.BAILINGMOE,
    "bailing_moe_v2": gguf.MODEL_ARCH.BAILINGMOE2,
    "deepseek": gguf.MODEL_ARCH.DEEPSEEK,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "falcon_mamba": gguf.MODEL_ARCH.MAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "jais2": gguf.MODEL_ARCH.JAIS2,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "orion": gguf.MODEL_ARCH.ORION,
    "internlm2": gguf.MODEL_ARCH.INTERNLM2,
    "mpt": gguf.MODEL_ARCH.MPT,
    "minicpm3": gguf.MODEL_ARCH.MINICPM3,
}
PERMUTED = (
    *("llama", "internlm2", "mistral", "mixtral", "smollm3", "granite", "arcee", "olmo"),
    *(
        "bailing_moe",
        "deepseek",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "ministral3",
    ),
)
_UNROUNDED = (
    *("ffn_gate_inp", "shortconv.conv.", "ssm_conv1d.", "position_embd.", "_norm."),
    *("altup", "laurel", "per_layer_model_proj"),
)
"""Weights that are F32 in any file, though they may have two dimensions."""
KINDS = {each.name: each for each in gguf.GGMLQuantizationType}
PYTHON_QUANTIZES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16", "F16", "F32")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[gguf.GGUFWriter], object]
StoredTensors = Iterator[tuple[str, str, Array]]
"""Names in a checkpoint, names in a file, and values."""
Rearrange = Callable[[StoredTensors], StoredTensors]
"""Makes the tensors of another form of file."""


def write(path: Path, architecture: str, fill: Change, max_tensors: int = 0) -> Path:
    """Write a file whose metadata and tensors `fill` adds; with `max_tensors`, several files of so
    many tensors, which have the names of pieces instead."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(values: Array, kind: str, seed: int = 0) -> Array:
    """The stored bytes of a tensor: its values rounded, or random blocks with small finite scales
    where `gguf` cannot round."""
    number = KINDS[kind]
    if kind in PYTHON_QUANTIZES:
        return gguf.quants.quantize(values, number)
    shape = gguf.quants.quant_shape_to_byte_shape(values.shape, number)
    num_elements, _ = gguf.GGML_QUANT_SIZES[number]
    blocks = (*shape[:-1], values.shape[-1] // num_elements)
    stored = random_blocks(kind, blocks, np.random.default_rng(seed), 2.0**-8)
    return stored.reshape(shape)


_SCALES = {
    **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **{"MXFP4": (), "NVFP4": (), "IQ1_M": ()},
}
"""Where the float16 numbers of a block lie, if not at its begin."""


def random_blocks(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0
) -> Array:
    """Return blocks [*shape, bytes] of random bits with finite scales: random ones, or `scale`."""
    num_bytes = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    stored = rng.integers(0, 256, (*shape, num_bytes), dtype=np.uint8)

    def drawn() -> Array:
        numbers = np.full(shape, scale) if scale else rng.uniform(-1, 1, shape)
        return numbers.astype("<f2")[..., None]

    for begin in _SCALES.get(kind, (0,)):
        stored[..., begin : begin + 2] = drawn().view(np.uint8)
    if kind == "MXFP4":
        stored[..., 0] = rng.integers(0, 250, shape)
    elif kind == "NVFP4":
        stored[..., :4] = rng.integers(0, 127, (*shape, 4))
    elif kind == "IQ1_M":
        words = stored[..., 48:].view("<u2")
        bits = drawn().view("<u2") >> np.arange(0, 16, 4, dtype=np.uint16) << 12
        words[...] = words & 0x0FFF | bits
    return stored


def write_model(
    path: Path,
    model: PreTrainedModel,
    change: Change | None = None,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    factors: Mapping[str, Array] | None = None,
    max_tensors: int = 0,
    rearrange: Rearrange = lambda tensors: tensors,
) -> Path:
    """Write a model of transformers, with the vocabulary of the bundled model.

    Args:
        path: the file.
        model: one of a family in ARCHITECTURES.
        change: adds further metadata.
        kind: the type of the matrices; all others are F32, as llama.cpp does it.
        kinds: other types by the names of a Hugging Face checkpoint.
        factors: the tensors of factors of frequencies, by name.
        max_tensors: as in `write`.
        rearrange: makes the tensors of another form of file; see `with_fused_experts` and
            `with_joined_latents`.
    """
    architecture = architecture_of(model.config)
    config = copy.deepcopy(model.config)
    # transformers refuses to say what differs by layer, unless it is asked for the others' value.
    config.allow_global_per_layer_attribute_access = True

    def fill(writer: gguf.GGUFWriter) -> None:
        add_sizes(writer, config)
        add_bundled_vocabulary(writer, model.config.vocab_size)
        if change is not None:
            change(writer)
        for name, values in (factors or _factors_of(config)).items():
            writer.add_tensor(name, np.asarray(values, np.float32))
        for name, stored, values in rearrange(stored_tensors(model)):
            chosen = (kinds or {}).get(name, kind_of(stored, values, kind))
            writer.add_tensor(stored, quantized(values, chosen), raw_dtype=KINDS[chosen])

    return write(path, gguf.MODEL_ARCH_NAMES[architecture], fill, max_tensors)


def kind_of(stored: str, values: Array, kind: str) -> str:
    """The type that a tensor gets in a file whose matrices have this one."""
    rounds = values.ndim > 1 and stored.endswith(".weight")
    if not rounds or any(part in stored for part in _UNROUNDED):
        return "F32"
    return "F16" if values.shape[-1] % gguf.GGML_QUANT_SIZES[KINDS[kind]][0] else kind


def with_fused_experts(tensors: StoredTensors) -> StoredTensors:
    """The same with one tensor for the gate and up of all experts of a layer: [experts, 2 * width,
    in], each expert's gate above its up, as the conversion stores with ``--fuse-gate-up-exps``."""

    def fused(gate: Array, up: Array) -> Array:
        return np.concatenate([gate, up], 1)

    return _with_joined(tensors, ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", fused)


def with_joined_latents(tensors: StoredTensors) -> StoredTensors:
    """The same with one tensor for the projections of latents to keys and values, as in the first
    files of the architecture deepseek2: [heads * (key width + value width), rank]."""

    def both(keys: Array, values: Array) -> Array:
        joined = np.concatenate([keys.swapaxes(1, 2), values], 1)
        return joined.reshape(-1, joined.shape[-1])

    return _with_joined(tensors, ("attn_k_b", "attn_v_b"), "attn_kv_b", both)


def with_joined_gates(tensors: StoredTensors) -> StoredTensors:
    """The same with one tensor for the projections of a delta net to queries, keys, values and
    gates, in a checkpoint's order, as in the first files of Qwen 3 Next. Its key heads are two."""

    def by_key_head(qkv: Array, gates: Array) -> Array:
        width = len(gates)
        keys = (len(qkv) - width) // 2
        parts = np.split(qkv, [keys, 2 * keys])
        of_heads = [np.split(part, 2) for part in (*parts, gates)]
        return np.concatenate([part[head] for head in range(2) for part in of_heads])

    return _with_joined(tensors, ("attn_qkv", "attn_gate"), "ssm_in", by_key_head)


def with_fused_qkv(tensors: StoredTensors) -> StoredTensors:
    """The same with one tensor for the queries, keys and values of each layer that has all three,
    as the conversion stores with ``--fuse-qkv``: [q rows + k rows + v rows, in]. Queries and keys
    have the order that they have apart. Biases are joined in the same way."""
    every = list(tensors)
    known = {stored: values for _, stored, values in every}
    for name, stored, values in every:
        layer, _, rest = stored.rpartition(".attn_")
        part, _, kind = rest.partition(".")
        names = [f"{layer}.attn_{each}.{kind}" for each in "qkv"]
        if stored not in names or not known.keys() >= set(names):
            yield name, stored, values
        elif part == "q":
            yield name, f"{layer}.attn_qkv.{kind}", np.concatenate([known[each] for each in names])


def with_unread_keys(
    tensors: StoredTensors, layers: Mapping[int, int], hidden_size: int
) -> StoredTensors:
    """The same with keys and values of layers that read those of earlier ones, two heads of these
    widths, by the number of the layer."""
    yield from tensors
    for layer, width in layers.items():
        for module in ("attn_k", "attn_v"):
            values = np.ones((2 * width, hidden_size), np.float32)
            yield module, f"blk.{layer}.{module}.weight", values
        yield "norm", f"blk.{layer}.attn_k_norm.weight", np.ones(width, np.float32)


def _with_joined(
    tensors: StoredTensors, parts: tuple[str, str], whole: str, join: Callable[..., Array]
) -> StoredTensors:
    """The same with one tensor for two of a layer."""
    waiting: dict[str, dict[str, Array]] = {}
    for name, stored, values in tensors:
        layer, _, module = stored.removesuffix(".weight").rpartition(".")
        if module not in parts:
            yield name, stored, values
            continue
        found = waiting.setdefault(layer, {})
        found[module] = values
        if len(found) == 2:
            yield name, f"{layer}.{whole}.weight", join(*(found[part] for part in parts))


def architecture_of(config: Any) -> gguf.MODEL_ARCH:
    """The architecture of the file of a model."""
    if config.model_type == "nemotron_h":
        has_experts = "moe" in config.layers_block_type
        return gguf.MODEL_ARCH.NEMOTRON_H_MOE if has_experts else gguf.MODEL_ARCH.NEMOTRON_H
    if hasattr(config, "sections"):  # what a language model has behind a tower
        return {
            "qwen2": gguf.MODEL_ARCH.QWEN2VL,
            "qwen3": gguf.MODEL_ARCH.QWEN3VL,
            "qwen3_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
        }[config.model_type]
    return ARCHITECTURES[config.model_type]


def stored_tensors(model: PreTrainedModel) -> StoredTensors:
    """The names in a checkpoint, the names that the `gguf` package gives them, and what llama.cpp's
    conversion stores."""
    config = model.config
    architecture = architecture_of(model.config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in stored_values(model):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = names.get_name(_renamed(name), try_suffixes=(".weight", ".bias", ".scale"))
        assert stored is not None, name
        yield name, stored, values


_NAMES = {
    "feed_forward.experts": "mlp.experts",
    "block_sparse_moe.experts": "mlp.experts",
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "gate.moe_statics": "moe_statics",
    "expert_bias": "expert_bias.bias",
    "e_score_correction_bias": "e_score_correction.bias",
}
"""Parts of names of transformers' modules, and what the names of `gguf` know."""


def _renamed(name: str) -> str:
    for part, known in _NAMES.items():
        name = name.replace(part, known)
    return name


def stored_values(model: PreTrainedModel) -> Iterator[tuple[str, Array]]:
    """The tensors as llama.cpp's conversion stores them, with their names in a checkpoint."""
    family = model.config.model_type
    stacked = _stacked(model.state_dict())
    for name, tensor in (_fused(stacked) if family in FUSED else stacked).items():
        values = tensor.float().numpy()
        if family in _ARRANGED:
            yield from _ARRANGED[family](name, values, model.config)
        elif name.endswith("experts.gate_up_proj"):
            yield from _halves(f"{name}.weight", "gate_up_proj", values)
        elif name.endswith("shared_mlp.input_linear.weight"):
            known = name.replace("shared_mlp", "mlp.shared_experts")
            yield from _halves(known, "input_linear", values)
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        elif "query_key_value" in name or (family == "gpt_bigcode" and "c_attn" in name):
            yield name, _all_queries_first(values, model.config)
        elif (family.startswith("gemma") or family == "nemotron") and name.endswith("norm.weight"):
            yield name, values + 1
        elif family in PERMUTED:
            yield name, permuted(values, name, model.config)
        elif family == "gpt2" and name.endswith(
            (".c_attn.weight", ".c_proj.weight", "c_fc.weight")
        ):
            yield name, np.ascontiguousarray(values.T)
        else:
            yield name, _without_dimension(name, values)


FUSED = ("bailing_moe_v2",)
"""The types of models whose queries, keys and values are one tensor in any file."""


def _fused(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one tensor for queries, keys and values."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        prefix, projection, _ = name.partition(".self_attn.q_proj.weight")
        if projection:
            parts = [tensors[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
            found[f"{prefix}.attention.query_key_value.weight"] = torch.cat(parts)
        elif not name.endswith((".self_attn.k_proj.weight", ".self_attn.v_proj.weight")):
            found[name] = tensor
    return found


def _stacked(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one tensor for all projections of streams of a kind, and for the norms of all
    heads."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        kind, _, number = name.removesuffix(".weight").rpartition(".")
        if not kind.startswith("model.altup_") and not kind.endswith("layernorm.norms"):
            found[name] = tensor
        elif number == "0":
            every = [each for each in tensors if each.startswith(f"{kind}.")]
            together = torch.stack([tensors[each] for each in every])
            found[f"{kind.removesuffix('.norms')}.weight"] = together
    return found


def _halves(name: str, joined: str, values: Array) -> Iterator[tuple[str, Array]]:
    for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2, -2), strict=True):
        yield name.replace(joined, part), np.ascontiguousarray(half)


def _without_dimension(name: str, values: Array) -> Array:
    """A matrix of one row as a vector, and convolutions as rows."""
    if name.endswith("conv.conv.weight"):
        return values[:, 0]
    return values[0] if name.endswith("shared_expert_gate.weight") else values


def _all_queries_first(values: Array, config: Any) -> Array:
    """The rows of all queries, all keys and all values, of those of each key head side by side."""
    count = num_kv_heads(config)
    heads = values.reshape(
        count, -1, config.hidden_size // config.num_attention_heads, *values.shape[1:]
    )
    parts = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _decay(values: Array) -> Array:
    """What the files have of the logarithms of decays, rounded once."""
    decay: Array = -np.exp(values.astype(np.float64)).astype(np.float32)
    return decay


def _of_qwen35(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter stores decays, weights of norms of 1 + w, and value heads in turn: the first
    one of each key head, then the second one of each."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    in_turn = np.arange(config.linear_num_value_heads).reshape(keys, -1).T.flatten()
    rows = (in_turn[:, None] * width + np.arange(width)).flatten()
    first = 2 * keys * config.linear_key_head_dim
    behind = np.concatenate([np.arange(first), first + rows])
    if name.endswith(".A_log"):
        values = -np.exp(values[in_turn])
    elif name.endswith((".dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        values = values[in_turn]
    elif name.endswith("in_proj_z.weight"):
        values = values[rows]
    elif name.endswith("in_proj_qkv.weight"):
        values = values[behind]
    elif name.endswith("conv1d.weight"):
        values = values[behind, 0]
    elif name.endswith("linear_attn.out_proj.weight"):
        values = np.ascontiguousarray(values[:, rows])
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _of_gemma3n(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """As the converter names them; `_stacked` has stacked the projections of streams."""
    yield (name if name.endswith(".weight") else f"{name}.weight"), values


def _of_gemma4(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter gives the factors of experts the names of what they are factors of."""
    name = name.replace("router.scale", "router.proj.scale")
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    yield name if name.endswith((".weight", ".scale")) else f"{name}.weight", values


def _factors_of(config: Any) -> dict[str, Array]:
    """The factors of longrope, and of the frequencies of Gemma 4's full layers, of which some pairs
    stand."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"])
            for kind in ("long", "short")
        }
    if config.model_type != "gemma4_text":
        return {}
    width = heads_of_layers(config)[config.layer_types.index("full_attention")][0]
    num_rotated = (
        int(width * config.rope_parameters["full_attention"]["partial_rotary_factor"]) // 2
    )
    values = [1.0] * num_rotated + [1e30] * (width // 2 - num_rotated)
    return {"rope_freqs.weight": np.array(values)}


def _of_gpt_oss(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    """The converter separates the rows of gates and ups, which take turns."""
    is_bias = name.endswith("_bias")
    if "experts" in name and not is_bias:
        values = np.ascontiguousarray(values.swapaxes(1, 2))
    kind = "bias" if is_bias else "weight"
    if "gate_up_proj" in name:
        for number, part in enumerate(("gate_proj", "up_proj")):
            stem = name.removesuffix("_bias").replace("gate_up_proj", part)
            yield f"{stem}.{kind}", np.ascontiguousarray(values[:, number::2])
    elif "experts" in name:
        yield f"{name.removesuffix('_bias')}.{kind}", values
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, values


def _of_llama4(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    """The converter separates the columns of gates and ups."""
    if name.endswith("gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values.swapaxes(1, 2))
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", np.ascontiguousarray(values.swapaxes(1, 2))
    else:
        yield name, values


def _of_qwen35_moe(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    if name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    else:
        for stored, found in _of_qwen35(name, values, config):
            yield stored, _without_dimension(name, found)


def _of_qwen3_next(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter stores the gates apart from queries, keys and values, each for all key heads;
    value heads keep their order."""
    if name.endswith("in_proj_qkvz.weight"):
        keys, key_width = config.linear_num_key_heads, config.linear_key_head_dim
        width = config.linear_num_value_heads // keys * config.linear_value_head_dim
        of_heads = values.reshape(keys, -1, values.shape[1])
        ends = np.cumsum([key_width, key_width, width])
        *qkv, gates = (each.reshape(-1, values.shape[1]) for each in np.split(of_heads, ends, 1))
        yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
        yield name.replace("qkvz", "z"), gates
    elif name.endswith(".A_log"):
        yield name, -np.exp(values)
    elif name.endswith("conv1d.weight"):
        yield name, values[:, 0]
    elif name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, values + 1
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), _without_dimension(name, values)


def _of_deepseek2(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter separates the projections to keys and to values, in the absorbed form."""
    if name.endswith("kv_b_proj.weight"):
        of_heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, of_values = np.split(of_heads, [config.qk_nope_head_dim], 1)
        yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(keys.swapaxes(1, 2))
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(of_values)
    elif name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    else:
        yield name, values


def _of_granite_hybrid(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter stores decays and skips as columns, and the norms of groups as rows."""
    if name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    elif name.endswith("input_linear.weight"):
        known = name.replace("shared_mlp", "mlp.shared_experts" if has_experts(config) else "mlp")
        yield from _halves(known, "input_linear", values)
    elif name.endswith("shared_mlp.output_linear.weight") and not has_experts(config):
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
    elif name.endswith(".A_log"):
        yield name, _decay(values)[:, None]
    elif name.endswith(".D"):
        yield name, values[:, None]
    elif name.endswith("mamba.norm.weight"):
        yield name, values.reshape(config.mamba_n_groups, -1)
    elif name.endswith("conv1d.weight"):
        yield name, values[:, 0]
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), permuted(values, name, config)


def _of_falcon_h1(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter multiplies matrices by the factors of the products."""
    attends, mamba = config.attention_in_multiplier, "mamba." in name
    factors = {
        "q_proj": attends,
        "k_proj": attends * config.key_multiplier,
        "v_proj": attends,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    own = name.removesuffix(".weight").rpartition(".")[2]
    if own == "in_proj":
        keys = config.mamba_n_groups * config.mamba_d_state
        widths = [config.mamba_d_ssm] * 2 + [keys] * 2 + [config.mamba_n_heads]
        scales = np.repeat(np.array(config.ssm_multipliers, np.float32), widths)
        values = values * (config.ssm_in_multiplier * scales)[:, None]
    elif own == "A_log":
        values = -np.exp(values)[:, None]
    elif own == "D":
        values = values[:, None]
    elif mamba and own == "norm":
        values = values.reshape(config.mamba_n_groups, -1)
    elif own == "conv1d" and values.ndim == 3:
        values = values[:, 0]
    name = name.replace("model.final_layernorm", "model.norm")
    yield name.replace(".dt_bias", ".dt_proj.bias"), values * np.float32(factors.get(own, 1.0))


def _of_nemotron_h(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    name = name.replace("model.", "backbone.").replace(".dt_bias", ".dt.bias")
    if name.endswith(".A_log"):
        values = _decay(values)[:, None]
    elif name.endswith(".D"):
        values = values[:, None]
    elif name.endswith("mixer.norm.weight"):
        values = values.reshape(config.n_groups, -1)
    elif name.endswith("conv1d.weight"):
        values = values[:, 0]
    elif ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp") + ".weight"
    yield name, values


def _of_mamba(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter stores decays, and of Mamba 2 columns and the norms of groups."""
    is_second = config.model_type == "mamba2"
    if name.endswith(".A_log"):
        values = _decay(values)
    elif name.endswith("conv1d.weight"):
        values = values[:, 0]
    if is_second and name.endswith((".A_log", ".D")):
        values = values[:, None]
    elif is_second and name.endswith("mixer.norm.weight"):
        values = values.reshape(config.n_groups, -1)
    name = name.replace("model.embeddings", "backbone.embeddings")
    if name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight".replace("feed_forward", "mlp"), "gate_up_proj", values)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight".replace("feed_forward", "mlp"), values
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _of_experts(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Gates and ups of experts are apart."""
    if name.endswith(".sinks"):
        yield f"{name}.weight", values
    elif name.endswith("experts.gate_up_proj"):
        yield from _halves(f"{name}.weight", "gate_up_proj", values)
    else:
        yield f"{name}.weight" if name.endswith("experts.down_proj") else name, values


def _of_bloom(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The converter takes the names of the bare model."""
    if "query_key_value" in name:
        values = _all_queries_first(values, config)
    yield name.removeprefix("transformer."), values


_ARRANGED: dict[str, Callable[[str, Array, Any], Iterator[tuple[str, Array]]]] = {
    "bloom": _of_bloom,
    "gpt_oss": _of_gpt_oss,
    **dict.fromkeys(("bailing_moe_v2", "mimo_v2_flash"), _of_experts),
    "gemma3n_text": _of_gemma3n,
    "llama4_text": _of_llama4,
    "gemma4_text": _of_gemma4,
    "granitemoehybrid": _of_granite_hybrid,
    "falcon_h1": _of_falcon_h1,
    "nemotron_h": _of_nemotron_h,
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "jamba"), _of_mamba),
    "qwen3_5_text": _of_qwen35,
    **dict.fromkeys(LATENTS, _of_deepseek2),
    "qwen3_5_moe_text": _of_qwen35_moe,
    "qwen3_next": _of_qwen3_next,
}
"""The families whose tensors the converter rearranges by themselves."""


def permuted(values: Array, name: str, config: Any) -> Array:
    """The rows of queries and keys in llama.cpp's order: neighbours are rotated together."""
    if "q_proj" in name:
        heads = config.num_attention_heads
    elif "k_proj" in name:
        heads = config.num_key_value_heads
    else:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def as_before_latents(config: Any) -> Change:
    """Changes the metadata of a model with latents to those of files from before llama.cpp kept
    these: see `with_joined_latents`."""

    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("key_length_mla", "value_length_mla"):
            del writer.kv_data[0][f"deepseek2.attention.{key}"]
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim)

    return change


def add_vocabulary(
    writer: gguf.GGUFWriter,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    pre: str | None = None,
) -> None:
    """Add a vocabulary with merges, or one of SentencePiece with scores."""
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))


def add_bundled_vocabulary(
    writer: gguf.GGUFWriter, vocab_size: int = 4096, pre: str = "gpt-2"
) -> None:
    """Add the bundled model's vocabulary, cut to a size."""
    directory = resolve_model("tiny")
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)[:vocab_size]
    known = set(tokens)
    merges = [" ".join(pair) for pair in model["merges"] if {*pair, "".join(pair)} <= known]
    kinds = [CONTROL if token_id < 3 else NORMAL for token_id in range(len(tokens))]
    add_vocabulary(writer, tokens, kinds, merges=merges or ["a b"], pre=pre)
    writer.add_eos_token_id(0)
    writer.add_chat_template(settings["chat_template"])
