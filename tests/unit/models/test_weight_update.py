"""`load_weights` replaces all given weights or none, with all copies that a model keeps."""

from __future__ import annotations

import pytest
import torch
from support.model_helpers import load, our_logits, reference_logits, reference_model, save

from shmllm.errors import RequestError
from shmllm.models.weight_update import is_finite

TOKENS = [3, 14, 15, 92, 6]


def snapshot(model):
    return {name: views[0].clone() for name, views in model.named_weights().items()}


def unchanged(model, before):
    return all(torch.equal(views[0], before[n]) for n, views in model.named_weights().items())


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def pair(request, tmp_path):
    """A model of ours, and a model of transformers' with the same shapes and other weights."""
    options = {"tie_word_embeddings": request.param == "qwen2"}
    first = load(save(reference_model(request.param, **options), tmp_path / "a"))
    return first, reference_model(request.param, scale=2.0, **options)


def test_loading_all_weights_of_another_model_gives_its_logits(pair):
    ours, other = pair
    written = ours.load_weights(reversed(list(other.named_parameters())))
    assert written == set(dict(other.named_parameters()))
    assert ours.weights_version == 1
    torch.testing.assert_close(
        our_logits(ours, TOKENS), reference_logits(other, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("falcon", True),
        ("gpt_bigcode", True),
        ("gpt_neox", False),
        ("gptj", False),
        ("olmo", True),
        ("phi", False),
        ("phi", True),
    ],
)
def test_weights_have_the_names_of_their_family(family, tied, tmp_path):
    options = {"tie_word_embeddings": tied} | ({"rotary_dim": 8} if family == "gptj" else {})
    first, other = (reference_model(family, scale, **options) for scale in (1.0, 2.0))
    ours = load(save(first, tmp_path))
    assert ours.load_weights(other.named_parameters()) == set(ours.named_weights())
    torch.testing.assert_close(
        our_logits(ours, TOKENS), reference_logits(other, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_some_weights_change_alone(pair):
    ours, _ = pair
    before = snapshot(ours)
    value = torch.randn_like(before["model.layers.1.mlp.up_proj.weight"]).to(torch.bfloat16)
    ours.load_weights([("model.layers.1.mlp.up_proj.weight", value)])
    after = snapshot(ours)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(after.pop(name), value.float())
    assert all(torch.equal(after[n], before[n]) for n in after)


def test_ignored_tensors_of_a_checkpoint_are_skipped(pair):
    ours, _ = pair
    extra = [("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(3))]
    if ours.config.tie_word_embeddings:
        extra.append(("lm_head.weight", torch.ones(97, 48)))
    assert ours.load_weights(extra) == set()
    assert ours.weights_version == 0


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.9.mlp.up_proj.weight", torch.ones(1), "no weight .* nearest name is model"),
        ("model.norm.weight", torch.ones(47), r"shape \[47\], the model's is \[48\]"),
        ("model.norm.weight", torch.ones(48, dtype=torch.int32), "floating"),
        ("", torch.ones(1), "no weight ''"),
    ],
)
def test_one_wrong_tensor_leaves_the_model_unchanged(pair, name, tensor, message):
    ours, other = pair
    before = snapshot(ours)
    with pytest.raises(RequestError, match=message):
        ours.load_weights([*other.named_parameters(), (name, tensor)])
    assert unchanged(ours, before)
    assert ours.weights_version == 0


def test_lost_weights_are_missing_until_each_is_written(pair):
    ours, other = pair
    assert ours.missing == set()
    ours.weights_lost()
    assert ours.missing == set(ours.named_weights())
    first, *rest = other.named_parameters()
    ours.load_weights([first])
    assert ours.missing == {name for name, _ in rest}
    with pytest.raises(RequestError):
        ours.load_weights([("no.such.weight", first[1])])
    assert ours.missing == {name for name, _ in rest}
    ours.load_weights(rest)
    assert ours.missing == set()
    torch.testing.assert_close(
        our_logits(ours, TOKENS), reference_logits(other, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, -2.0], True),
        (["largest", "largest"], True),  # the sum overflows
        (["largest", "-largest"], True),
        ([float("nan"), 1.0], False),
        ([float("inf"), 1.0], False),
        ([float("inf"), float("-inf")], False),
    ],
)
def test_values_that_are_not_finite_are_found(dtype, values, expected):
    largest = torch.finfo(dtype).max
    known = {"largest": largest, "-largest": -largest}
    tensor = torch.zeros(5000, dtype=dtype)
    tensor[[17, 4321]] = torch.tensor([known.get(each, each) for each in values], dtype=dtype)
    assert is_finite(tensor) is expected
