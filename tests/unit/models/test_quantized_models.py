"""Whole models from quantized checkpoints: logits, updates, shards, memory, and damaged files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import (
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.quantized_checkpoints import (
    Weight,
    awq,
    bitsandbytes,
    config_group,
    fp8,
    gptq,
    int_quantized,
    load_packed,
    mxfp4,
    named,
    nvfp4,
    pack_quantized,
    read_weight,
    write_checkpoint,
)
from support.variants import slow

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.matrices import TransposedMatrix

TOKENS = [5, 17, 3, 88, 41, 2, 9]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def quantized_pair(
    directory: Path, config: Any, make: Callable[[tuple[int, int]], Weight], num_shards: int = 1
) -> tuple[Path, Path]:
    """A checkpoint whose projections `make` made, and one with their values in float32."""
    plain = save(reference_model("llama", 4.0, **SIZES), directory / "plain")
    packed = save(reference_model("llama", 4.0, **SIZES), directory / "packed")
    tensors = load_file(plain / "model.safetensors")
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    count = 0
    for name, tensor in list(tensors.items()):
        parts = {name: tensor}
        if name.endswith("_proj.weight"):
            weight = make((tensor.shape[0], tensor.shape[1]))
            tensors[name] = weight.values
            parts = named(name.removesuffix(".weight"), weight)
        for part, value in parts.items():
            shards[count % num_shards][part] = value
            count += 1
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return write_checkpoint(packed, config, *shards), plain


INT4 = config_group(num_bits=4, strategy="group", group_size=32)
CASES: dict[str, tuple[Any, Callable[[tuple[int, int]], Weight]]] = {
    "int8": (
        config_group(num_bits=8, strategy="channel", format="int-quantized"),
        int_quantized,
    ),
    "int4": (INT4, pack_quantized),
    "int4-g64": (
        config_group(num_bits=4, strategy="channel"),
        lambda shape: pack_quantized(shape, group=None),
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda shape: nvfp4(shape, of_modelopt=True),
    ),
}
WIDENED: dict[str, tuple[Any, Callable[[tuple[int, int]], Weight]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
    "fp8": ({"quant_method": "fp8"}, lambda shape: fp8(shape, None, ".weight_scale")),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, bitsandbytes),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CASES)
def test_logits_are_those_of_the_values(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    packed, plain = quantized_pair(tmp_path, *CASES[kind])
    model = load_packed(packed, dtype)
    assert {layer.mixer.o_proj.weight.kind for layer in model.layers} == {kind}
    expected = our_logits(load_packed(plain), TOKENS)
    bound = 2e-5 if dtype is torch.float32 else 0.03
    assert_logits_close(our_logits(model, TOKENS), expected, bound)


@pytest.mark.parametrize("name", [*CASES, *WIDENED])
def test_widened_weights_give_the_same_logits_as_floats(name: str, tmp_path: Path) -> None:
    packed, plain = quantized_pair(tmp_path, *(CASES | WIDENED)[name])
    ours = our_logits(load_packed(packed, keeps_packed=False), TOKENS)
    assert torch.equal(ours, our_logits(load_packed(plain), TOKENS))


@pytest.mark.parametrize("name", [*CASES, *WIDENED])
def test_each_packed_matrix_has_the_values_of_its_tensor(name: str, tmp_path: Path) -> None:
    packed, plain = quantized_pair(tmp_path, *(CASES | WIDENED)[name], num_shards=3)
    model, other = load_packed(packed), load_packed(plain)
    expected = other.named_weights()
    for weight, views in model.named_weights().items():
        assert torch.equal(views[0].clone(), expected[weight][0].clone()), weight


def test_modules_of_one_checkpoint_may_have_either_format_of_modelopt(tmp_path: Path) -> None:
    made: list[Weight] = []

    def make(shape: tuple[int, int]) -> Weight:
        is_float4 = len(made) % 2 == 0
        made.append(nvfp4(shape, True) if is_float4 else fp8(shape, None, ".weight_scale"))
        return made[-1]

    layers = {
        "model.layers.0.mlp.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
    }
    method = {"producer": {"name": "modelopt"}, "quant_algo": "MIXED_PRECISION"}
    packed, plain = quantized_pair(tmp_path, method | {"quantized_layers": layers}, make)
    model, other = load_packed(packed), load_packed(plain)
    kinds = {layer.mixer.o_proj.weight.kind for layer in model.layers}
    assert kinds == {"nvfp4", "fp8"}
    expected = other.named_weights()
    for weight, views in model.named_weights().items():
        assert torch.equal(views[0].clone(), expected[weight][0].clone()), weight


def test_quantized_experts_of_gemma4_are_a_module_of_each(tmp_path: Path) -> None:
    mixture = {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 2}
    sizes = SIZES | {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    reference = reference_model("gemma4", **sizes, **mixture, moe_intermediate_size=32)
    plain, packed = save(reference, tmp_path / "plain"), save(reference, tmp_path / "packed")
    tensors = load_file(plain / "model.safetensors")
    parts = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        del parts[name]
        module, _, projection = name.rpartition(".")
        each = ["gate_proj", "up_proj"] if "gate_up" in projection else [projection]
        _, rows, width = tensors[name].shape
        for expert in range(3):
            made = [nvfp4((rows // len(each), width), of_modelopt=True) for _ in each]
            tensors[name][expert] = torch.cat([weight.values for weight in made])
            for one, weight in zip(each, made, strict=True):
                parts |= named(f"{module}.{expert}.{one}", weight)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    write_checkpoint(packed, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, parts)
    model, other = load_packed(packed), load_packed(plain)
    assert {layer.mlp.experts.down_proj.weight.kind for layer in model.layers} == {"nvfp4"}
    assert_logits_close(our_logits(model, TOKENS), our_logits(other, TOKENS), 2e-5)


def test_experts_that_read_a_latent_may_have_both_formats_of_modelopt(tmp_path: Path) -> None:
    """NVIDIA's checkpoints of Nemotron 3 Super and Ultra have experts of NVFP4, and projections of
    latents of FP8 or none."""
    kinds: dict[str, Callable[[tuple[int, int]], Weight]] = {
        ".experts.": lambda shape: nvfp4(shape, of_modelopt=True),
        ".shared_experts.": lambda shape: fp8(shape, None, ".weight_scale"),
        ".fc1_latent_proj.": lambda shape: fp8(shape, None, ".weight_scale"),
    }
    sizes = {"layers_block_type": ["moe", "full_attention"], "head_dim": 16, "n_routed_experts": 4}
    sizes |= {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80}
    reference = reference_model("nemotron_h", 2.0, **SIZES | sizes, moe_latent_size=32)
    plain, packed = save(reference, tmp_path / "plain"), save(reference, tmp_path / "packed")
    tensors = load_file(plain / "model.safetensors")
    parts = dict(tensors)
    for name in tensors:
        make = next((each for part, each in kinds.items() if part in name), None)
        if make is not None:
            weight = make((tensors[name].shape[0], tensors[name].shape[1]))
            tensors[name] = weight.values
            del parts[name]
            parts |= named(name.removesuffix(".weight"), weight)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    layers = {"backbone.layers.0.mixer.fc1_latent_proj": {"quant_algo": "FP8"}}
    method = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    write_checkpoint(packed, method | {"quantized_layers": layers}, parts)
    model = load_packed(packed)
    mixture = model.layers[0].mlp
    assert mixture.experts.down_proj.weight.kind == "nvfp4"
    assert mixture.shared.down_proj.weight.kind == mixture.latent_down.weight.kind == "fp8"
    assert_logits_close(our_logits(model, TOKENS), our_logits(load_packed(plain), TOKENS), 2e-5)


def gpt_oss(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of gpt-oss, and its tensors with the experts' values."""
    model = reference_model(
        "gpt_oss", 4.0, **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    )
    save(model, directory)
    tensors = load_file(directory / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, width, rows = tensor.shape
            weight = mxfp4(num_experts, rows, width)
            tensors[name] = weight.values
            del stored[name]
            stored |= named(name, weight)
    return write_checkpoint(directory, {"quant_method": "mxfp4"}, stored), tensors


def differing(model: DecoderModel, tensors: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, views in model.named_weights().items()
        if not torch.equal(views[0].clone(), tensors[name])
    ]


def test_packed_experts_have_the_transposed_values(tmp_path: Path) -> None:
    directory, tensors = gpt_oss(tmp_path)
    model = load_packed(directory)
    assert differing(model, tensors) == []
    assert model.layers[0].mlp.down_proj.weight.kind == "mxfp4"
    experts = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    assert all(isinstance(model.named_weights()[name][0], TransposedMatrix) for name in experts)
    assert differing(load_packed(directory, keeps_packed=False), tensors) == []


def test_an_update_rounds_transposed_values(tmp_path: Path) -> None:
    directory, tensors = gpt_oss(tmp_path)
    model = load_packed(directory)
    names = sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))
    name = names[0]
    new = tensors[name].flip(0).mul(0.5)
    assert model.load_weights([(name, new)]) == {name}
    assert torch.equal(model.named_weights()[name][0].clone(), new)
    with pytest.raises(ValueError, match="cannot write"):
        model.named_weights()[name][0].copy_(new.transpose(1, 2))
    assert model.load_weights([(name, tensors[name])]) == {name}
    assert differing(model, tensors) == []


@pytest.mark.parametrize("kind", ["int4", slow("int8")])
def test_modules_of_the_experts_of_llama_4(kind: str, tmp_path: Path) -> None:
    """Quantizers store a module of each expert, where other checkpoints have one tensor of all."""
    config, make = CASES[kind]
    reference = reference_model(
        "llama4", 4.0, **SIZES, head_dim=16, num_local_experts=3, intermediate_size_mlp=64
    )
    save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored, modules = dict(tensors), dict[str, Weight]()
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            weight = make((tensor.shape[0], tensor.shape[1]))
            tensors[name] = weight.values
            modules[name.removesuffix(".weight")] = weight
        elif ".experts." in name:
            module, _, projection = name.rpartition(".")
            parts = projection.replace("gate_up", "gate,up").removesuffix("_proj").split(",")
            num_experts, width, rows = tensor.shape
            for expert in range(num_experts):
                made = [make((rows // len(parts), width)) for _ in parts]
                tensors[name][expert] = torch.cat([each.values for each in made]).t()
                named_parts = (f"{module}.{expert}.{part}_proj" for part in parts)
                modules |= dict(zip(named_parts, made, strict=True))
        else:
            continue
        del stored[name]
    for module, weight in modules.items():
        stored |= named(module, weight)
    reference.load_state_dict(tensors)
    model = load_packed(write_checkpoint(tmp_path, config, stored))
    assert model.layers[1].mlp.gate_up_proj.weight.kind == kind
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 2e-5)


def test_the_values_of_experts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    name, weight = "experts.gate_up_proj", mxfp4(2, 24, 64)
    write_checkpoint(tmp_path, {"quant_method": "mxfp4"}, named(name, weight))
    expected = convert_moe_packed_tensors(weight.parts["_blocks"], weight.parts["_scales"])
    assert torch.equal(read_weight(tmp_path, name, torch.bfloat16)[1], expected)


def test_blocks_of_fp8_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = fp8((256, 384), (128, 128))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path, config, named("a", weight))
    dequantize: Any = Fp8Dequantize(None)
    expected = dequantize._dequantize_one(
        weight.parts[".weight"], weight.parts[".weight_scale_inv"]
    )
    kind, values, _ = read_weight(tmp_path, "a.weight", expected.dtype)
    assert kind == "fp8"
    assert torch.equal(values, expected)


def test_progress_ends_complete(tmp_path: Path) -> None:
    from shmllm.models.weights import load_weights

    packed, _ = quantized_pair(tmp_path, INT4, pack_quantized, num_shards=2)
    model, seen = load_packed(packed), list[tuple[int, int]]()
    load_weights(model, packed, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def failure(directory: Path) -> str:
    with pytest.raises(EngineStartError) as caught:
        load_packed(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


Change = Callable[[dict[str, torch.Tensor]], object]
DOWN = "model.layers.1.mlp.down_proj"
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "no scales": ("int4", lambda t: t.pop(f"{DOWN}.weight_scale"), ".weight_scale is missing"),
    "no shape": ("int4", lambda t: t.pop(f"{DOWN}.weight_shape"), ".weight_shape is missing"),
    "no numbers": ("int4", lambda t: t.pop(f"{DOWN}.weight_packed"), f"lacks {DOWN}.weight"),
    "scales of another shape": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(64, 2)}),
        ".weight_scale has shape [64, 2], it must have [64, 3]",
    ),
    "scales of another dtype": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(64, 3, dtype=torch.int32)}),
        ".weight_scale has dtype I32",
    ),
    "scales that are not finite": (
        "int4",
        lambda t: t[f"{DOWN}.weight_scale"].fill_(float("inf")),
        ".weight_scale has scales that are not finite",
    ),
    "another shape": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_shape": torch.tensor([64, 95])}),
        "has shape [64, 95], the config asks for [64, 96]",
    ),
    "numbers of another shape": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_shape": torch.tensor([64, 128])}),
        ".weight_packed has shape [64, 12], it must have [64, 16]",
    ),
    "no groups": ("gptq", lambda t: t.pop(f"{DOWN}.qzeros"), ".qzeros is missing"),
    "groups out of range": (
        "gptq",
        lambda t: t[f"{DOWN}.g_idx"].fill_(7),
        ".g_idx names groups outside of 0 to 2",
    ),
    "zeros of another shape": (
        "awq",
        lambda t: t.update({f"{DOWN}.qzeros": torch.zeros(3, 7, dtype=torch.int32)}),
        ".qzeros has shape [3, 7], it must have [3, 8]",
    ),
    "NaN": (
        "fp8",
        lambda t: t[f"{DOWN}.weight"].view(torch.uint8)[3].fill_(255),
        ".weight has values that are not numbers",
    ),
    "no scale": ("fp8", lambda t: t.pop(f"{DOWN}.weight_scale"), ".weight_scale is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_component_is_named(damage: str, tmp_path: Path) -> None:
    name, change, expected = DAMAGES[damage]
    packed, _ = quantized_pair(tmp_path, *(CASES | WIDENED)[name])
    file = packed / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    message = failure(packed)
    assert expected in message
    assert DOWN in message
    assert str(packed) in message


CT = "compressed-tensors"
REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ({"quant_algo": "MIXED_PRECISION"}, "needs 'quantized_layers'"),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m.x": {"quant_algo": "MXFP8"}}},
        "m.x: quant_algo 'MXFP8'",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
        "global_quant_config: weight: dtype 'fp4'",
    ),
    (
        {
            "quant_method": "quark",
            "layer_quant_config": {"*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_group"}}},
        },
        "qscheme 'per_group' is not supported",
    ),
    ({"quant_method": "quark", "export": {"weight_format": "fake"}}, "weight_format 'fake'"),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllama"}, "exllama"),
    (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"m.x": {"bits": 8}}},
        "other options for 'm.x'",
    ),
    (
        {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage 'bfloat16'",
    ),
    ({"bits": 4}, "quant_method None is not supported"),
    ({"quant_method": "gptq", "bits": 3}, "3 bits are not supported"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "'+:x'"),
    ({"quant_method": "awq", "bits": 3}, "3 bits are not supported"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size'"),
    ({"quant_method": CT, "format": "marlin-24"}, "format 'marlin-24'"),
    (config_group(num_bits=3), "3 bits of type 'int' are not supported"),
    (config_group(num_bits=6, type="float"), "6 bits of type 'float' are not supported"),
    (
        config_group(num_bits=4, type="float", strategy="group", group_size=16),
        "4 bits of type 'float' in groups of 16 with strategy 'group'",
    ),
    (config_group(num_bits=4, strategy="tensor_group"), "strategy 'tensor_group'"),
    (config_group(num_bits=4, ignore=["re:("]), "wrong pattern 're:('"),
    (config_group(num_bits=4, ignore=["re:.*down_proj"]), "'ignore' names its module"),
    (
        {"quant_method": CT, "config_groups": {"g": {"targets": ["re:x"], "weights": {}}}},
        "no group of 'config_groups' names its module",
    ),
]


@pytest.mark.parametrize(("config", "expected"), REFUSED)
def test_what_is_not_supported_is_named(config: Any, expected: str, tmp_path: Path) -> None:
    packed, _ = quantized_pair(tmp_path, INT4, pack_quantized)
    file = packed / "model.safetensors"
    write_checkpoint(packed, config, load_file(file))
    assert expected in failure(packed)


def test_groups_of_the_config_are_found_by_name_before_class(tmp_path: Path) -> None:
    first = config_group(num_bits=4, strategy="group", group_size=32)
    named_group = {
        "targets": ["re:.*(down|o)_proj$"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "format": "int-quantized",
    }
    first["config_groups"]["group_1"] = named_group
    torch.manual_seed(1)
    shards = named("m.up_proj", pack_quantized((8, 64))) | named(
        "m.down_proj", int_quantized((8, 64))
    )
    write_checkpoint(tmp_path, first, shards)
    assert read_weight(tmp_path, "m.up_proj.weight")[0] == "int4"
    assert read_weight(tmp_path, "m.down_proj.weight")[0] == "int8"


def test_a_family_with_transposed_matrices_is_refused(tmp_path: Path) -> None:
    directory = save(reference_model("gpt2", n_embd=48, n_head=6, n_layer=1), tmp_path)
    write_checkpoint(directory, WIDENED["gptq"][0], load_file(directory / "model.safetensors"))
    with pytest.raises(EngineStartError, match="quantized checkpoints of this family"):
        ModelConfig.from_directory(directory)


LOAD_AND_PRINT_PEAK = """
import sys
from pathlib import Path
import torch
from support.quantized_checkpoints import _checkpoint_files, _filled
from shmllm.models.matrices import FORMATS

def most():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
def read(file, name, matrix):
    if matrix is None:
        with file.tensor(name) as tensor:
            return float(tensor.view(-1)[0])
    file.read_packed(name, matrix)
    return float(matrix.scales.view(-1)[0])

file, = _checkpoint_files(Path(sys.argv[1]))
with file:
    kinds, shapes = file.kinds(), file.shapes()
    packed = sys.argv[2] == "packed"
    matrix = FORMATS[kinds["w.0.weight"]].make(shapes["w.0.weight"], torch.float32, _filled)
    read(file, "w.0.weight", matrix if packed else None)
    open("/proc/self/clear_refs", "w").write("5")
    before = most()
    for name in shapes:
        read(file, name, matrix if packed else None)
    file.kinds()
    print(most() - before)
"""


@pytest.mark.parametrize("way", ["packed", "widened"])
def test_loading_holds_at_most_one_tensor(way: str, tmp_path: Path) -> None:
    """Runs in a separate process, because the peak memory is that of a whole process."""
    weight = gptq((1024, 4096), group=128)
    tensors = {}
    for index in range(8):
        parts = named(f"w.{index}", weight)
        tensors |= {name: part.clone() for name, part in parts.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    write_checkpoint(tmp_path, config, tensors)
    command = [sys.executable, "-c", LOAD_AND_PRINT_PEAK, str(tmp_path), way]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root.parent}:{root.parent / 'kernels'}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown = int(done.stdout)
    stored = weight.parts[".qweight"].nbytes
    floats = 4 * weight.values.numel()
    assert grown < (2 * stored + 2**24 if way == "packed" else floats + 2 * stored + 2**24)


DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
UNUSUAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "qwen3_5": DELTA_NET,
    "qwen3_next": DELTA_NET | {"mlp_only_layers": [*range(4)]},
    "gemma4": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
    },
}


@pytest.mark.parametrize("kind", ["fp8", "w4a16"])
@pytest.mark.parametrize("family", UNUSUAL)
def test_rows_that_are_no_neighbours_or_twice_there(family: str, kind: str, tmp_path: Path) -> None:
    """Queries and gates in one tensor, a delta net's projections by key heads, one tensor for keys
    and values, and one for all that a Mamba 2 reads."""
    config, make = {
        "fp8": (
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            lambda shape: fp8(shape, (16, 16)),
        ),
        "w4a16": (config_group(num_bits=4, strategy="group", group_size=32), pack_quantized),
    }[kind]
    options = SIZES | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    reference = reference_model(family, 4.0, **options | UNUSUAL[family])
    directory = save(reference, tmp_path)
    tensors, values = load_file(directory / "model.safetensors"), reference.state_dict()
    packed = [f"_proj{end}.weight" for end in ("", "_qkv", "_z", "_qkvz")]
    for name in [name for name in tensors if name.endswith(tuple(packed))]:
        weight = make((tensors[name].shape[0], tensors.pop(name).shape[1]))
        values[name].copy_(weight.values)
        tensors |= named(name.removesuffix(".weight"), weight)
    write_checkpoint(directory, config, tensors)
    model = load_packed(directory, torch.float32)
    assert model.has_packed == (kind == "w4a16")  # groups of 16 columns are not packed
    expected = reference(torch.tensor([TOKENS])).logits[0].detach()
    assert_logits_close(our_logits(model, TOKENS), expected, 1e-4)
