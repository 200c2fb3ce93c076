"""A rank's share of an adapter: it adds what an update adds to the rank's share of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import lora_adapters, lora_experts
from support.reference_models import QUICK, VARIANTS, make_model
from support.variants import slow
from torch import Tensor

from shmllm.models.computed_linears import computed_linears
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.experts import ExpertLinear
from shmllm.models.fields import Fields
from shmllm.models.lora import LoraProduct, LoraWeights, make_lora
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.shard import Shard
from shmllm.models.sharding import shard_config

RANK = 3
SCALE = 2.0
FIELDS = {"r": RANK, "lora_alpha": SCALE * RANK}
SHOWN = (*QUICK, "gpt2", "phi3", "mixtral", "gpt_oss", "qwen3_next", "mamba2")
CASES = [(k, 2) if k in SHOWN else slow(k, 2) for k in VARIANTS if k != "zamba2"]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def part_of(directory: Path, rank: int, size: int) -> DecoderModel:
    config = ModelConfig.from_directory(directory)
    return create_model(shard_config(config, Shard(rank, size)), torch.float32, zeros)


def read(tensors: dict[str, Tensor], model: DecoderModel, **fields: Any) -> LoraWeights:
    given = Fields(FIELDS | fields, "the fields"), Fields(tensors, "the tensors")
    return make_lora(*given, LoraTargets(model), RANK, torch.float32)


def change_of(product: LoraProduct, shape: tuple[int, ...]) -> Tensor:
    """What an adapter adds to the matrix [out, in] of a product."""
    found, first = torch.zeros(shape), 0
    for part in product.parts:
        a = product.a[first : first + part.rank]
        first += part.rank
        for b, column in part.outputs:
            found[column : column + len(b)] += part.scale * b @ a
    return found


def matrices_of(model: DecoderModel) -> list[Tensor]:
    """The matrix of each product, in the order of `LoraTargets.products`."""
    found: list[Tensor] = []
    for linear in computed_linears(model):
        assert isinstance(linear.weight, Tensor)
        found += linear.weight if isinstance(linear, ExpertLinear) else [linear.weight]
    return found


def assert_changes(model: DecoderModel, weights: LoraWeights) -> None:
    """The weights of the model are what the adapter adds to products."""
    matrices = matrices_of(model)
    for index, product in weights.products.items():
        expected = matrices[index]
        assert expected.any()
        found = change_of(product, tuple(expected.shape))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        expected.zero_()
    assert not any(matrix.any() for matrix in matrices)


def write_changes(model: DecoderModel, tensors: dict[str, Tensor]) -> None:
    """Write what an adapter of modules amounts to, as a checkpoint's weights are written."""
    prefix, destinations = lora_adapters.PREFIX, model.destinations()
    for name in tensors:
        module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
        if name.endswith(".lora_A.weight"):
            change = SCALE * tensors[f"{prefix}{module}.lora_B.weight"] @ tensors[name]
            for view in destinations[f"{module}.weight"]:
                view.copy_(change.t() if model.config.transposed else change)


def drawn_for(model: DecoderModel) -> dict[str, Tensor]:
    """An adapter of all modules that adapters can change."""
    targets = LoraTargets(model)
    found = {name: targets.target_of(name) for name in targets.names}
    shapes = {name: (each.out_features, each.in_features) for name, each in found.items() if each}
    return lora_adapters.draw(shapes, 5, RANK, 1.0)


@pytest.mark.parametrize(("kind", "size"), [*CASES, ("llama", 4), slow("mixtral", 4)])
def test_the_share_of_an_adapter_is_that_of_the_weights(
    kind: str, size: int, tmp_path: Path
) -> None:
    make_model(kind, tmp_path)
    tensors = drawn_for(create_model(ModelConfig.from_directory(tmp_path), torch.float32, zeros))
    found = []
    for rank in range(size):
        model = part_of(tmp_path, rank, size)
        found.append(read(tensors, model))
        write_changes(model, tensors)
        assert_changes(model, found[-1])
    assert len({each.digest for each in found}) == 1
    if model.partial:
        assert found[-1].num_bytes < sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen2_moe", slow("granite_moe_hybrid")])
def test_parameters_of_all_experts_are_divided_likewise(kind: str, tmp_path: Path) -> None:
    reference = make_model(kind, tmp_path)
    tensors, changes = lora_experts.fused(reference, 7, RANK)
    for rank in range(2):
        model = part_of(tmp_path, rank, 2)
        weights = read(tensors, model, target_parameters=lora_experts.PARAMETERS)
        written: dict[str, Tensor] = {}
        for change in changes:
            of_all = written.setdefault(
                change.parameter, torch.zeros_like(reference.get_parameter(change.parameter))
            )
            one = SCALE * change.b @ change.a
            of_all[change.expert] += one if one.shape == of_all.shape[1:] else one.t()
        for name, tensor in written.items():
            for view in model.destinations()[name]:
                view.copy_(tensor)
        assert_changes(model, weights)


def test_the_digest_is_that_of_the_whole_adapter(tmp_path: Path) -> None:
    """Adapters that differ in another rank's share alone differ."""
    make_model("llama", tmp_path)
    whole = create_model(ModelConfig.from_directory(tmp_path), torch.float32, zeros)
    tensors = drawn_for(whole)
    (name, *_) = (name for name in tensors if "down_proj.lora_A" in name)
    changed = tensors | {name: tensors[name].clone()}
    changed[name][0, -1] += 1
    model = part_of(tmp_path, 0, 2)
    one, other = read(tensors, model), read(changed, model)
    assert one.digest == read(tensors, whole).digest != other.digest
    for index, product in one.products.items():
        assert torch.equal(product.a, other.products[index].a)
