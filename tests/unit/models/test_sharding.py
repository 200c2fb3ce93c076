"""The parts of models that the ranks of a group have: sizes, weights, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import allocate
from support.reference_models import QUICK, VARIANTS, make_model
from support.variants import slow
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models import quantized
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.matrices import FORMATS, Elsewhere, PackedShare, ShardedMatrix
from shmllm.models.shard import Shard
from shmllm.models.sharding import shard_config, stage_config
from shmllm.models.shares import Share
from shmllm.models.weights import load_dummy_weights, load_weights

CASES = [
    kind if kind in (*QUICK, "gpt2", "gpt_oss", "qwen3_next") else slow(kind) for kind in VARIANTS
]


@pytest.fixture(scope="module", params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    return path


def parts_of(directory: Path, size: int, quantization: str | None = None) -> list[DecoderModel]:
    config = ModelConfig.from_directory(directory)
    found = []
    for rank in range(size):
        part = shard_config(config, Shard(rank, size))
        found.append(create_model(part, torch.float32, allocate, quantization))
        load_weights(found[-1], directory)
    return found


def gathered(parts: list[DecoderModel], name: str) -> Tensor:
    """The tensor of a name, of which each part has some elements, and zeros for the others."""
    views = [part.destinations()[name] for part in parts]
    whole = torch.zeros(views[0][0].shape)
    for destinations in views:
        for view in destinations:
            values = view.clone()
            assert not values.isnan().any(), f"a weight of {name} was not loaded"
            is_own = values != 0
            is_shared = is_own & (whole != 0)
            assert torch.equal(whole[is_shared], values[is_shared])
            whole[is_own] = values[is_own]
    return whole


def test_the_ranks_have_all_weights_of_the_checkpoint(directory: Path) -> None:
    model = create_model(ModelConfig.from_directory(directory), torch.float32, allocate)
    load_weights(model, directory)
    parts = parts_of(directory, 2)
    for name, views in model.destinations().items():
        expected = views[0].clone()
        assert list(parts[0].destinations()[name][0].shape) == list(expected.shape), name
        assert torch.equal(gathered(parts, name), expected), name
    own = [sum(each.weight.numel() for each in made_by(part)) for part in parts]
    assert max(own) < sum(view[0].numel() for view in model.named_weights().values())


def made_by(part: DecoderModel) -> list[Any]:
    from shmllm.models.build import without_memory

    return without_memory(part.config)[1]


def test_random_weights_are_those_of_one_process(directory: Path) -> None:
    config = ModelConfig.from_directory(directory)
    model = create_model(config, torch.float32, allocate)
    load_dummy_weights(model, seed=3)
    part = create_model(shard_config(config, Shard(1, 2)), torch.float32, allocate)
    load_dummy_weights(part, seed=3)
    for name, views in part.named_weights().items():
        if isinstance(views[0], Elsewhere):  # one of several norms, of which the other rank has it
            continue
        own, expected = views[0].clone(), model.named_weights()[name][0].clone()
        is_own = own != 0
        assert is_own.any() or not expected.any(), name
        assert torch.equal(own[is_own], expected[is_own]), name


def test_random_weights_of_a_stage_are_those_of_one_process(llama: Path) -> None:
    config = ModelConfig.from_directory(llama)
    model = create_model(config, torch.float32, allocate)
    load_dummy_weights(model, seed=3)
    last = create_model(stage_config(config, 1, 2), torch.float32, allocate)
    load_dummy_weights(last, seed=3)
    found = {n: v[0] for n, v in last.named_weights().items() if isinstance(v[0], torch.Tensor)}
    own = {name: view for name, view in found.items() if view.device.type != "meta"}
    assert any("layers" in name for name in own)
    for name, view in own.items():
        assert torch.equal(view, model.named_weights()[name][0]), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    make_model("llama", path)
    return path


DIVIDED = {
    "llama": ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
    "gpt2": ("transformer.h.0.mlp.c_proj.weight", "transformer.h.0.attn.c_attn.weight"),
    "gpt_oss": (
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
}
"""By family, a matrix whose columns ranks divide, and one whose rows. A file of the last two has
them transposed."""


def make_with_inner(kind: str, inner: int, directory: Path) -> ModelConfig:
    """A model whose feed-forward has that many inner elements."""
    make_model(kind, directory, **{"n_inner" if kind == "gpt2" else "intermediate_size": inner})
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", DIVIDED)
def test_rows_are_rounded_before_their_columns_are_divided(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    config = make_with_inner(kind, 128, tmp_path)
    model = create_model(config, torch.float32, allocate, quantization)
    load_weights(model, tmp_path)
    parts = parts_of(tmp_path, 2, quantization)
    for name in DIVIDED[kind]:
        assert isinstance(parts[0].named_weights()[name][0], ShardedMatrix)
        assert torch.equal(gathered(parts, name), model.named_weights()[name][0].clone()), name


@pytest.mark.parametrize("kind", DIVIDED)
def test_rows_are_not_rounded_to_groups_of_two_ranks(kind: str, tmp_path: Path) -> None:
    make_with_inner(kind, 96, tmp_path)
    with pytest.raises(EngineStartError, match="int4 cannot be divided at column 48, within a"):
        parts_of(tmp_path, 2, "int4")


def test_ranks_beyond_the_key_value_heads_share_them(llama: Path) -> None:
    config = ModelConfig.from_directory(llama)
    parts = [shard_config(config, Shard(rank, 4)) for rank in range(4)]
    mixer: Any = parts[0].layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads) == (1, 1)
    assert [part.shard.find(16, 32).start for part in parts] == [0, 0, 16, 16]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "does not divide the 2 key-value heads of LlamaForCausalLM; possible: 1, 2, 4"),
        (8, "does not divide the 4 heads of LlamaForCausalLM; possible: 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(llama: Path, size: int, message: str) -> None:
    with pytest.raises(EngineStartError, match=f"tensor_parallel_size {size} {message}"):
        shard_config(ModelConfig.from_directory(llama), Shard(0, size))


def test_delta_nets_whose_value_heads_take_turns_are_not_divided(tmp_path: Path) -> None:
    make_model("qwen3_5", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["linear_value_heads_tiled"] = True
    (tmp_path / "config.json").write_text(json.dumps(fields))
    message = "does not divide the delta nets of a GGUF file of .*; possible: 1$"
    with pytest.raises(EngineStartError, match=message):
        shard_config(ModelConfig.from_directory(tmp_path), Shard(0, 2))


def test_mamba_2_stays_whole_if_its_parts_are_too_narrow_for_kernels(tmp_path: Path) -> None:
    make_model("bamba", tmp_path, mamba_d_state=20)
    config = ModelConfig.from_directory(tmp_path)
    assert shard_config(config, Shard(0, 2)).layers[0].mixer == config.layers[0].mixer


def test_branches_stay_whole_and_in_one_stage(tmp_path: Path) -> None:
    make_model("zamba2", tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    part = shard_config(config, Shard(0, 2))
    assert [one == other for one, other in zip(part.layers, config.layers, strict=True)] == [
        layer.branch is not None for layer in config.layers
    ]
    with pytest.raises(EngineStartError, match="its layers share weights or embeddings"):
        stage_config(config, 0, 2)


@pytest.mark.parametrize("vocab_size", [10, 11, 97])
def test_each_token_belongs_to_one_rank(llama: Path, vocab_size: int) -> None:
    config = replace(ModelConfig.from_directory(llama), vocab_size=vocab_size)
    parts = [shard_config(config, Shard(rank, 4)).own_tokens for rank in range(4)]
    assert [token for part in parts for token in part] == list(range(vocab_size))


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_rows_are_divided_without_being_rounded_again(kind: str) -> None:
    whole = FORMATS[kind].make((10, 512), torch.float32, allocate)
    whole.copy_(torch.randn(10, 512))
    rows = torch.tensor([1, 2, 3, 7, 5])
    own = FORMATS[kind].make((5, 256), whole.dtype, allocate)
    share = Share((10, 512), (rows, torch.arange(256, 512)))
    PackedShare(own, share).write(lambda some: (whole.integers[some], whole.scales[some]))
    assert torch.equal(own.clone(), whole.clone()[rows, 256:])


def test_packed_rows_are_divided_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "MOVED_AT_ONCE", 3 * 64)
    whole = FORMATS["int8"].make((10, 128), torch.float32, allocate).copy_(torch.randn(10, 128))
    own = FORMATS["int8"].make((8, 64), whole.dtype, allocate)
    rows, read = torch.tensor([0, 1, 4, 5, 6, 7, 8, 9]), []

    def packed(some: slice) -> tuple[Tensor, Tensor]:
        read.append((some.start, some.stop))
        return whole.integers[some], whole.scales[some]

    PackedShare(own, Share((10, 128), (rows, torch.arange(64)))).write(packed)
    assert sorted(read) == [(0, 2), (4, 7), (7, 10)]
    assert torch.equal(own.clone(), whole.clone()[rows, :64])


@pytest.mark.parametrize(("kind", "begin"), [("int4", 32), ("q4_k", 64), ("q6_k", 128)])
def test_packed_rows_are_not_divided_within_a_group(kind: str, begin: int) -> None:
    whole = FORMATS[kind].make((4, 512), torch.float32, allocate)
    own = FORMATS[kind].make((4, 256), whole.dtype, allocate)
    with pytest.raises(EngineStartError, match=f"{kind} cannot be divided at column {begin}"):
        own.columns_of(whole.integers, whole.scales, begin)


def test_a_share_of_several_dimensions_has_runs_of_rows() -> None:
    share = Share((3, 4, 8), (torch.arange(3), torch.tensor([1, 2]), torch.arange(4)))
    runs = [(own.start, own.stop, whole.start) for own, whole in share.row_runs()]
    assert runs == [(0, 2, 1), (2, 4, 5), (4, 6, 9)]
    values = torch.arange(96.0).view(3, 4, 8)
    assert torch.equal(share.of(values), values[:, 1:3, :4])
    exchanged = share.transposed().of(values.transpose(1, 2))
    assert torch.equal(exchanged, share.of(values).transpose(1, 2))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_stages_have_each_layer_once(llama: Path, count: int) -> None:
    config = ModelConfig.from_directory(llama)
    stages = [stage_config(config, index, count).stage for index in range(count)]
    layers = [layer for stage in stages for layer in stage.layers or ()]
    assert layers == list(range(config.num_layers))
    assert all(stage.layers for stage in stages)
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "expected"),
    [
        (30, 1, [15, 15]),
        (30, 8 * 288, [17, 13]),
        (30, 16 * 288, [19, 11]),
        (4, 10**6, [3, 1]),
        (7, 1, [4, 3]),
    ],
)
def test_the_head_counts_for_the_last_stage(
    llama: Path, num_layers: int, vocab_size: int, expected: list[int]
) -> None:
    """A layer of this model has 448 rows."""
    config = ModelConfig.from_directory(llama)
    layers = config.layers[:1] * num_layers
    config = replace(config, layers=layers, vocab_size=vocab_size * 448 // 288)
    stages = [stage_config(config, index, 2).stage for index in range(2)]
    assert [len(stage.layers or ()) for stage in stages] == expected


def test_more_stages_than_layers_are_refused(llama: Path) -> None:
    with pytest.raises(EngineStartError, match=r"it has 3 layers; possible: 1 to 3$"):
        stage_config(ModelConfig.from_directory(llama), 0, 4)


def test_the_stages_have_all_weights_together(llama: Path) -> None:
    config = ModelConfig.from_directory(llama)
    model = create_model(config, torch.float32, allocate)
    load_weights(model, llama)
    stages = [stage_config(config, index, 2) for index in range(2)]
    parts = [create_model(stage, torch.float32, allocate) for stage in stages]
    for part in parts:
        load_weights(part, llama)
    for name, views in model.destinations().items():
        assert torch.equal(gathered(parts, name), views[0].clone()), name
    kept = [
        {
            name
            for name, views in part.named_weights().items()
            if not isinstance(views[0], Elsewhere)
        }
        for part in parts
    ]
    assert not kept[0] & kept[1]
