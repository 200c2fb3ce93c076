"""Checkpoints of quantized matrices with random components, and the values that these stand for.

The values follow the definition of each format, apart from the code that is tested.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shmllm.models.checkpoint import CheckpointFile
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model, stored_parts
from shmllm.models.decoder import DecoderModel
from shmllm.models.matrices import FORMATS
from shmllm.models.weights import _checkpoint_files, load_weights, stored_kinds

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Weight:
    """
    Attributes:
        parts: the components, by the ends of their names.
        values: [out, in] float32.
    """

    parts: dict[str, Tensor]
    values: Tensor


def words(numbers: Tensor, bits: int) -> Tensor:
    """[rows, numbers] -> [rows, words] int32, from the lowest bits on."""
    per_word = 32 // bits
    missing = -numbers.shape[1] % per_word
    numbers = torch.nn.functional.pad(numbers.long(), (0, missing)).unflatten(1, (-1, per_word))
    sums = (numbers << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).to(torch.int32)


def random_scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.02 + 0.001).to(dtype)


def gptq(
    shape: tuple[int, int],
    bits: int = 4,
    group: int = 32,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
    added: int = 1,
    shuffled: bool = False,
) -> Weight:
    rows, width = shape
    num_groups = -(-width // group)
    numbers = torch.randint(0, 2**bits, (width, rows))
    stored = torch.randint(0, 2**bits, (num_groups, rows))
    if symmetric:
        stored.fill_(2 ** (bits - 1) - added)
    places = torch.arange(width) // group
    if shuffled:
        places = places[torch.randperm(width)]
    scales = random_scales(num_groups, rows, dtype=dtype)
    values = (numbers - (stored + added)[places]).float() * scales.float()[places]
    parts = {
        ".qweight": words(numbers.t(), bits).t().contiguous(),
        ".qzeros": words(stored, bits),
        ".scales": scales,
        ".g_idx": places.to(torch.int32),
    }
    return Weight(parts, values.t().contiguous())


def awq(shape: tuple[int, int], group: int = 32, dtype: torch.dtype = torch.float16) -> Weight:
    rows, width = shape
    num_groups = -(-width // group)
    numbers = torch.randint(0, 16, (width, rows))
    zeros = torch.randint(0, 16, (num_groups, rows))
    scales = random_scales(num_groups, rows, dtype=dtype)
    places = torch.arange(width) // group
    values = (numbers - zeros[places]).float() * scales.float()[places]

    def packed(columns: Tensor) -> Tensor:
        return words(columns.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4)

    parts = {".qweight": packed(numbers), ".qzeros": packed(zeros), ".scales": scales}
    return Weight(parts, values.t().contiguous())


def float8_codes(*shape: int) -> Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # these stand for NaN
    return codes.view(torch.float8_e4m3fn)


def fp8(
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    name: str = ".weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> Weight:
    """A weight with a scale for each block; None: one for all."""
    codes = float8_codes(*shape)
    if block is None:
        scales = random_scales(1, dtype=dtype)
        return Weight({".weight": codes, name: scales}, codes.float() * scales.float())
    scales = random_scales(-(-shape[0] // block[0]), -(-shape[1] // block[1]), dtype=dtype)
    every = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    values = codes.float() * every[: shape[0], : shape[1]]
    return Weight({".weight": codes, name: scales}, values)


def pack_quantized(
    shape: tuple[int, int],
    bits: int = 4,
    group: int | None = 32,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = True,
    shuffled: bool = False,
) -> Weight:
    rows, width = shape
    size = group or width
    num_groups = -(-width // size)
    half = 2 ** (bits - 1)
    numbers = torch.randint(-half, half, shape)
    zeros = torch.randint(-half, half, (rows, num_groups))
    if symmetric:
        zeros.zero_()
    places = torch.arange(width) // size
    if shuffled:
        places = places[torch.randperm(width)]
    scales = random_scales(rows, num_groups, dtype=dtype)
    values = (numbers - zeros[:, places]).float() * scales.float()[:, places]
    parts = {
        ".weight_packed": words(numbers + half, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        parts[".weight_zero_point"] = words((zeros + half).t(), bits).t().contiguous()
    if shuffled:
        parts[".weight_g_idx"] = places.to(torch.int32)
    return Weight(parts, values)


def int_quantized(
    shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, group: int | None = None
) -> Weight:
    numbers = torch.randint(-128, 128, shape, dtype=torch.int8)
    size = group or shape[1]
    scales = random_scales(shape[0], shape[1] // size, dtype=dtype)
    values = numbers.float() * scales.float().repeat_interleave(size, 1)
    return Weight({".weight": numbers, ".weight_scale": scales}, values)


def mxfp4(num_experts: int, rows: int, width: int) -> Weight:
    """Its values are [experts, in, out]."""
    blocks = torch.randint(0, 256, (num_experts, rows, width // 32, 16), dtype=torch.uint8)
    powers = torch.randint(110, 124, (num_experts, rows, width // 32), dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    values = torch.empty(num_experts, rows, width)
    values[..., 0::2] = table[(blocks & 15).int()].flatten(2)
    values[..., 1::2] = table[(blocks >> 4).int()].flatten(2)
    values *= (2.0 ** (powers.double() - 127)).float().repeat_interleave(32, 2)
    return Weight({"_blocks": blocks, "_scales": powers}, values.transpose(1, 2))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])


def neighbours(octets: Tensor, high_first: bool = False) -> Tensor:
    """The codes of 4 bits in bytes [rows, bytes], [rows, 2 * bytes] int."""
    halves = [(octets & 15).int(), (octets >> 4).int()]
    return torch.stack(halves[::-1] if high_first else halves, 2).flatten(1)


def nvfp4(shape: tuple[int, int], of_modelopt: bool = False) -> Weight:
    rows, width = shape
    octets = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
    factors = torch.randint(48, 80, (rows, width // 16), dtype=torch.uint8)
    factors = factors.view(torch.float8_e4m3fn)
    scale = torch.rand(1) * 0.004 + 0.001
    every = (factors.float() * scale).repeat_interleave(16, 1)
    values = E2M1[neighbours(octets)] * every
    if of_modelopt:
        parts = {".weight": octets, ".weight_scale": factors, ".weight_scale_2": scale[0]}
        return Weight(parts | {".input_scale": torch.tensor(0.5)}, values)
    divisor = torch.exp2(torch.randint(5, 12, (1,)).float())
    values = E2M1[neighbours(octets)] * (factors.float() / divisor).repeat_interleave(16, 1)
    parts = {".weight_packed": octets, ".weight_scale": factors, ".weight_global_scale": divisor}
    return Weight(parts, values)


def mxfp4_rows(shape: tuple[int, int]) -> Weight:
    rows, width = shape
    octets = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
    powers = torch.randint(110, 124, (rows, width // 32), dtype=torch.uint8)
    scales = (2.0 ** (powers.double() - 127)).float().repeat_interleave(32, 1)
    values = E2M1[neighbours(octets)] * scales
    return Weight({".weight_packed": octets, ".weight_scale": powers}, values)


NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def bitsandbytes(
    shape: tuple[int, int], kind: str = "nf4", block: int = 64, nested: bool = True
) -> Weight:
    """A weight of 4 bits, with scales that are places in a table, or as they are."""
    rows, width = shape
    count = -(-rows * width // block)
    table = NF4.clone() if kind == "nf4" else torch.randn(16)
    octets = torch.randint(0, 256, (rows * width // 2, 1), dtype=torch.uint8)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    state |= {"shape": list(shape)}
    scales = torch.rand(count) * 0.1
    parts = {".weight": octets, ".weight.absmax": scales, ".weight.quant_map": table}
    if nested:
        places = torch.randint(0, 256, (count,), dtype=torch.uint8)
        nested_table, nested_scales = torch.randn(256), torch.rand(-(-count // 256))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        scales = nested_table[places.int()] * nested_scales[torch.arange(count) // 256] + 0.0625
        parts |= {
            ".weight.absmax": places,
            ".weight.nested_absmax": nested_scales,
            ".weight.nested_quant_map": nested_table,
        }
    content = json.dumps(state).encode()
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(content)).byte()
    codes = neighbours(octets.view(1, -1), high_first=True)[0]
    values = table[codes] * scales.repeat_interleave(block)[: rows * width]
    return Weight(parts, values.view(shape))


def bitsandbytes_8(shape: tuple[int, int]) -> Weight:
    numbers = torch.randint(-127, 128, shape, dtype=torch.int8)
    largest = torch.rand(shape[0]) * 3
    parts = {".weight": numbers, ".SCB": largest, ".weight_format": torch.tensor(0).byte()}
    return Weight(parts, numbers.float() * (largest / 127)[:, None])


def config_group(**weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors with one group."""
    form = weights.pop("format", "pack-quantized")
    ignore = weights.pop("ignore", ["lm_head"])
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def named(module: str, weight: Weight) -> dict[str, Tensor]:
    return {f"{module}{part}": tensor for part, tensor in weight.parts.items()}


def write_checkpoint(directory: Path, quantization: Any, *shards: dict[str, Tensor]) -> Path:
    """Writes files, and a config.json that has nothing else unless it exists."""
    config = directory / "config.json"
    fields = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(fields | {"quantization_config": quantization}))
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors")
        return directory
    (directory / "model.safetensors").unlink(missing_ok=True)
    names: dict[str, str] = {}
    for index, shard in enumerate(shards):
        names |= dict.fromkeys(shard, f"model-{index}.safetensors")
        save_file(shard, directory / f"model-{index}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return directory


def read_weight(
    directory: Path, name: str, dtype: torch.dtype = torch.float32
) -> tuple[str | None, Tensor, Tensor]:
    """A weight's kind, the values of the matrix as a model reads it, and the widened ones."""
    for file in _checkpoint_files(directory):
        with file:
            if name in file.shapes():
                return file.kinds().get(name), _as_loaded(file, name, dtype), _widened(file, name)
    raise AssertionError(f"no file has {name}")


def _as_loaded(file: CheckpointFile, name: str, dtype: torch.dtype) -> Tensor:
    kind, shape = file.kinds().get(name), file.shapes()[name]
    if kind is None:
        return _widened(file, name).to(dtype)
    is_transposed = len(shape) == 3  # only experts of MXFP4 are
    if is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    matrix = FORMATS[kind].make(shape, dtype, _filled)
    file.read_packed(name, matrix)
    values = matrix.clone()
    return values.transpose(1, 2) if is_transposed else values


def _widened(file: CheckpointFile, name: str) -> Tensor:
    with file.tensor(name) as tensor:
        return tensor.clone()


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def load_packed(
    directory: Path, dtype: torch.dtype = torch.float32, keeps_packed: bool = True
) -> DecoderModel:
    """A model with the matrices as the checkpoint packs them, or widened."""
    config = ModelConfig.from_directory(directory)
    kinds = stored_kinds(directory, config.tie_word_embeddings) if keeps_packed else {}
    model = create_model(config, dtype, _filled, None, stored_parts(config, kinds))
    load_weights(model, directory)
    return model
