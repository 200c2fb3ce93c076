"""What a probe finds in a module, and which modules it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import reference_model, save
from support.transformers_models import make_family
from transformers.models.llama import modeling_llama

from shmllm.errors import EngineStartError
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.transformers_impl.interface import (
    PAGED,
    PROBED,
    UnsupportedCallError,
    attending,
)
from shmllm.models.transformers_impl.module import make_module
from shmllm.models.transformers_impl.probe import Findings, probe
from shmllm.models.transformers_impl.storage import give_memory
from shmllm.models.transformers_impl.windows import find_window


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def made(directory: Path, family: str) -> Any:
    make_family(family, directory)
    module = make_module(directory, torch.float32, PROBED)
    give_memory(module, zeros)
    return module


def findings(directory: Path, family: str) -> Findings:
    return probe(made(directory, family), 512)


def test_windows_and_heads_of_each_layer(tmp_path: Path) -> None:
    found = findings(tmp_path, "exaone4")
    assert [spec.window for spec in found.layers.specs] == [16, 16, 16, None]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in found.layers.specs} == {
        (4, 2, 16)
    }
    assert (found.hidden_size, found.vocab_size) == (64, 512)


def test_caps_and_sinks(tmp_path: Path) -> None:
    capped, sinking = (findings(tmp_path / name, name) for name in ("vaultgemma", "flint"))
    assert {spec.soft_cap for spec in capped.layers.specs} == {50.0}
    assert all(spec.sinks for spec in sinking.layers.specs)


def test_a_value_narrower_than_its_key_takes_the_room_of_a_key(tmp_path: Path) -> None:
    [spec] = {*findings(tmp_path, "deepseek_v3").layers.specs}
    assert spec == AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=32, scale=32**-0.5)


def test_the_weights_are_zeros_afterwards(tmp_path: Path) -> None:
    module = made(tmp_path, "gemma")
    probe(module, 512)
    assert not any(parameter.any() for parameter in module.parameters())
    assert module.config._attn_implementation == PAGED


class Mixing(torch.nn.Module):
    """An MLP whose output of a token has some of the token before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, dims=1)


class Counting(modeling_llama.LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        scales = torch.arange(hidden_states.shape[1]).float()[None, :, None]
        return super().forward(hidden_states * scales, **others)


class Twice(modeling_llama.LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        super().forward(hidden_states, **others)
        return super().forward(hidden_states, **others)


class Asking(modeling_llama.LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        return super().forward(hidden_states, position_bias=torch.ones(1), **others)


class Masking(modeling_llama.LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        mask = others.pop("attention_mask")
        mask = mask if mask is None else mask.clone()
        return super().forward(hidden_states, attention_mask=mask, **others)


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    save(reference_model("llama"), tmp_path)
    module = make_module(tmp_path, torch.float32, PROBED)
    give_memory(module, zeros)
    return module


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Counting, "its attention counts tokens instead of taking their positions"),
        (Twice, "a layer calls its attention twice in a forward pass"),
        (Asking, "its attention has the argument 'position_bias'"),
        (Masking, "it changes the masks that transformers makes"),
    ],
)
def test_attention_that_is_not_plain_is_refused(llama: Any, attention: Any, reason: str) -> None:
    llama.model.layers[1].self_attn.__class__ = attention
    with pytest.raises(UnsupportedCallError, match=reason):
        probe(llama, 256)


def test_tokens_that_mix_outside_of_attention_are_refused(llama: Any) -> None:
    llama.model.layers[1].mlp = Mixing()
    with pytest.raises(UnsupportedCallError, match="influence each other outside of attention"):
        probe(llama, 256)


def test_attention_to_later_tokens_is_refused(llama: Any) -> None:
    llama.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedCallError, match="its attention is not causal"):
        probe(llama, 256)


def test_a_module_whose_layers_never_call_is_refused(llama: Any) -> None:
    llama.model.layers = torch.nn.ModuleList()
    llama.config.num_hidden_layers = llama.model.config.num_hidden_layers = 0
    with pytest.raises(UnsupportedCallError, match="call no attention function"):
        probe(llama, 256)


def test_nothing_attends_outside_of_a_block(llama: Any) -> None:
    with attending(lambda call: call.query.transpose(1, 2)):
        pass
    llama.set_attn_implementation(PAGED)
    with pytest.raises(LookupError):
        llama(torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.parametrize("window", [1, 7, 8, 99])
def test_the_window_of_a_function(window: int) -> None:
    assert find_window(lambda b, h, q, k: (k <= q) & (k > q - window), 100) == window


def test_a_causal_function_has_no_window() -> None:
    assert find_window(lambda b, h, q, k: k <= q, 100) is None
    assert find_window(lambda b, h, q, k: (k <= q) & (k > q - 100), 100) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        lambda b, h, q, k: (k <= q) | ((k < 4) & (q < 4)),
        lambda b, h, q, k: (k <= q) & ((k > q - 9) | (k == 0)),
    ],
    ids=["both ways", "chunks", "prefix", "window and first"],
)
def test_other_functions_are_refused(function: Any) -> None:
    with pytest.raises(UnsupportedCallError, match="neither causal nor a causal sliding window"):
        find_window(function, 100)


def test_a_mask_of_more_than_positions_is_refused() -> None:
    table = torch.zeros(1, 6)
    with pytest.raises(UnsupportedCallError, match="depends on more than positions"):
        find_window(lambda b, h, q, k: (k <= q) & (table[b, k] == 0), 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "transformers .* has no class FooForCausalLM"),
        ({"architectures": ["GemmaModel"]}, "GemmaModel is not a causal language model"),
        ({"architectures": ["LlamaForCausalLM"]}, "does not run models of type 'gemma'"),
        ({"architectures": []}, "'architectures' must name the model's class"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized checkpoints"),
        ({"model_type": "foo"}, "transformers .* cannot read it"),
        ({"hidden_size": "x"}, "cannot read it .*hidden_size"),
        ({"hidden_act": "nope"}, "transformers cannot make it"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_family("gemma", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EngineStartError, match=message) as caught:
        make_module(tmp_path, torch.float32, PROBED)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
