"""Operations on the CPU: models of each feature, compared with the definitions in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_helpers import assert_logits_close, our_logits
from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.layers import Linear, Norm, Storage, TokenEmbedding
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.mlp import MLP
from shmllm.models.rope import inverse_frequencies
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm_kernels.reference.activation import activate, xielu
from shmllm_kernels.reference.norm import layer_norm, rms_norm
from shmllm_kernels.reference.rope import rotate

TOKENS = list(range(40, 90)) * 2
ROPE = RopeConfig(rotary_dim=16)
ATTENTION = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, rope=ROPE)
LAYER = LayerSpec(mixer=ATTENTION, mlp=MLPSpec(inner=40))
PLAIN = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    max_position_embeddings=256,
    layers=(LAYER,) * 3,
    norm=NormSpec(eps=1e-5),
)
SANDWICH = LayerNorms(
    before_mixer="a", after_mixer="b", before_mlp="c", after_mlp="d"
)  # fmt: skip


def with_layer(config: ModelConfig = PLAIN, **options: Any) -> ModelConfig:
    """Changes the second of three layers."""
    return replace(config, layers=(LAYER, replace(LAYER, **options), LAYER))


def with_attention(config: ModelConfig = PLAIN, **options: Any) -> ModelConfig:
    return with_layer(config, mixer=replace(ATTENTION, **options))


def with_mlp(activation: str, is_gated: bool) -> ModelConfig:
    return with_layer(mlp=MLPSpec(inner=40, activation=activation, gated=is_gated, bias=True))


PARTIAL = replace(ROPE, rotary_dim=6, interleaved=True)
MODELS = {
    "plain": PLAIN,
    "LayerNorm": replace(PLAIN, norm=NormSpec(kind="layer", bias=True)),
    "norm offset": with_attention(replace(PLAIN, norm=NormSpec(offset=1.0)), qk_norm="head"),
    "norms around": with_layer(replace(PLAIN, norm=NormSpec(offset=1.0)), norms=SANDWICH),
    "norms behind": with_layer(norms=LayerNorms(after_mixer="b", after_mlp="d")),
    "parallel": with_layer(norms=LayerNorms(before_mixer="a"), parallel=True),
    "factors": replace(
        PLAIN, residual_scale=0.22, embedding_scale=12.0, logits_scale=0.125, logits_cap=2.0
    ),
    "positions": replace(with_attention(rope=None), num_learned_positions=128),
    "wide norms": with_attention(qk_norm="row"),
    "partial rotation": with_attention(rope=replace(ROPE, rotary_dim=6)),
    "interleaved": with_attention(rope=PARTIAL),
    "scores": with_attention(soft_cap=2.0, sinks=True, scale=0.5, window=20, output_bias=True),
    "gelu": with_mlp("gelu", is_gated=True),
    "gelu_tanh": with_mlp("gelu_tanh", is_gated=True),
    "no gate": with_mlp("gelu_tanh", is_gated=False),
    "bounds": with_attention(clip=0.3, qk_norm="head"),
    "learned activation": with_mlp("xielu", is_gated=False),
}


def make_model(config: ModelConfig) -> DecoderModel:
    generator = torch.Generator().manual_seed(3)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        return (numbers * (0.15 if len(shape) > 1 else 0.5)).to(dtype)

    return DecoderModel(config, Storage(allocate, torch.float32))


class ReferenceOps:
    """The operations of `models.ops` in float64, of one sequence from its first token on."""

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        out = embedding.table[TOKENS].double() * embedding.scale
        positions = embedding.positions
        return out if positions is None else out + positions[: len(TOKENS)].double()

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        if x is not None:
            residual += scale * x
        return residual if norm is None else self.norm(residual, norm)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.spec.kind == "layer":
            assert norm.bias is not None
            return layer_norm(x, norm.weight, norm.bias, norm.spec.eps).double()
        return rms_norm(x, norm.weight.double(), norm.spec.eps, norm.spec.offset)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = x @ linear.weight.double().t()
        return out if linear.bias is None else out + linear.bias.double()

    def mlp(self, x: Tensor, mlp: MLP) -> Tensor:
        projected = self.linear(x, mlp.gate_up_proj)
        if mlp.learned is not None:
            return self.linear(xielu(projected, mlp.learned.double()), mlp.down_proj)
        inner = activate(projected, mlp.spec.activation, mlp.spec.gated)
        return self.linear(inner, mlp.down_proj)

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        return x * scale if cap is None else cap * torch.tanh(x * scale / cap)

    def clip(self, x: Tensor, bound: float) -> Tensor:
        return x.clamp(-bound, bound)

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        spec, count = attention.spec, len(qkv)
        parts = list(qkv.split([spec.query_width, spec.key_width, spec.value_width], -1))
        for i, norm in enumerate(attention.norms):
            width = spec.head_dim if spec.qk_norm == "head" else parts[i].shape[1]
            parts[i] = self.norm(parts[i].unflatten(1, (-1, width)), norm).flatten(1)
        query, key = (part.unflatten(1, (-1, spec.head_dim)) for part in parts[:2])
        value = parts[2].unflatten(1, (-1, spec.value_head_dim))
        if spec.rope is not None:
            angles = torch.arange(count)[:, None, None] * inverse_frequencies(spec.rope).double()
            cos = torch.cat([angles.cos()] * 2, -1)
            sin = torch.cat([-angles.sin(), angles.sin()], -1)
            query, key = (rotate(x, cos, sin, spec.rope.interleaved) for x in (query, key))
        key, value = (x.repeat_interleave(spec.num_heads // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (distance < 0) | (distance >= (spec.window or count))
        scores = scores.masked_fill(hidden, -torch.inf)
        if attention.sinks is not None:
            sinks = attention.sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sinks], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], value).flatten(1)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_feature_computes_its_definition(name: str) -> None:
    model, ops = make_model(MODELS[name]), ReferenceOps()
    expected = model.logits(ops, model.forward(ops))
    if name != "plain":
        plain = make_model(PLAIN)
        assert not torch.equal(expected, plain.logits(ops, plain.forward(ops)))
    assert_logits_close(our_logits(model, TOKENS), expected.float(), 2e-5)
