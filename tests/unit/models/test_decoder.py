"""The order of a layer's operations, with operations on buffers that later calls overwrite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.layer_specs import PRE_NORMS, LayerNorms, LayerSpec
from shmllm.models.layers import Linear, Norm, Storage, TokenEmbedding
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.mlp import MLP
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec

HIDDEN, INNER, TOKENS = 8, 12, 3
ATTENTION = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, rope=RopeConfig(rotary_dim=4)
)
PRE = LayerSpec(mixer=ATTENTION, mlp=MLPSpec(inner=INNER))
POST_NORMS = LayerNorms(after_mixer="after_a", after_mlp="after_m")
SANDWICH = LayerNorms(
    before_mixer="before_a",
    after_mixer="after_a",
    before_mlp="before_m",
    after_mlp="after_m",
)
ONE_NORM = LayerNorms(before_mixer="input_layernorm")


def config_of(layer: LayerSpec, **options: object) -> ModelConfig:
    plain = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=HIDDEN,
        max_position_embeddings=32,
        layers=(layer,) * 2,
        norm=NormSpec(eps=1e-3),
    )
    return replace(plain, **options)


def make_model(config: ModelConfig) -> DecoderModel:
    generator = torch.Generator().manual_seed(3)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    return DecoderModel(config, Storage(allocate, torch.float64))


def normed(x: Tensor, norm: Norm) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.spec.eps).sqrt()


def mixed(qkv: Tensor) -> Tensor:
    """Stands for attention: a function of queries and keys."""
    return qkv[:, :HIDDEN].tanh() + qkv[:, HIDDEN:].sum(-1, keepdim=True)


class PlainOps:
    """Operations as `models.ops` defines them. One buffer for each width of a product, and one for
    the results of `add_norm`, as on the devices."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._products: dict[int, Tensor] = {}
        self._normed = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.float64)

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        return embedding.table[:TOKENS].clone()

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        self.calls.append("add_norm" if norm is not None else "add")
        if x is not None:
            residual += scale * x
        if norm is None:
            return residual
        return self._normed.copy_(normed(residual, norm))

    def norm_sum(self, x: Tensor, residual: Tensor, norm: Norm, scale: float) -> Tensor:
        self.calls.append("norm_sum")
        residual += scale * x
        return residual.copy_(normed(residual, norm))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        self.calls.append("norm")
        return x.copy_(normed(x, norm))

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        width = linear.weight.shape[0]
        out = self._products.setdefault(width, x.new_empty(TOKENS, width))
        assert isinstance(linear.weight, Tensor)
        return out.copy_(x @ linear.weight.t() + (0 if linear.bias is None else linear.bias))

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        self.calls.append("attend")
        return mixed(qkv)

    def mlp(self, x: Tensor, mlp: MLP) -> Tensor:
        self.calls.append("mlp")
        projected, inner = self.linear(x, mlp.gate_up_proj), mlp.spec.inner
        return self.linear(projected[:, :inner].sigmoid() * projected[:, -inner:], mlp.down_proj)

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        x *= scale
        return x if cap is None else x.copy_(cap * (x / cap).tanh())


def forward(model: DecoderModel) -> Tensor:
    """The definition of the forward pass, without shared buffers."""
    scale = model.config.residual_scale
    stream = model.embedding.table[:TOKENS].clone()
    for layer in model.layers:
        names, norms = layer.spec.norms, layer.norms

        def maybe(x: Tensor, name: str | None, norms: dict[str, Norm] = norms) -> Tensor:
            return x if name is None else normed(x, norms[name])

        inside, behind = (names, LayerNorms()) if not names.of_sums else (LayerNorms(), names)
        reads, before = maybe(stream, names.before_mixer), stream
        out = mixed(reads @ layer.mixer.qkv_proj.weight.t())
        out = maybe(out @ layer.mixer.o_proj.weight.t(), inside.after_mixer)
        stream = maybe(stream + scale * out, behind.after_mixer)
        if not layer.spec.parallel:
            reads = maybe(stream, names.before_mlp)
        elif names.before_mlp is not None:
            reads = maybe(before, names.before_mlp)
        up = reads @ layer.mlp.gate_up_proj.weight.t()
        out = (up[:, :INNER].sigmoid() * up[:, -INNER:]) @ layer.mlp.down_proj.weight.t()
        stream = maybe(stream + scale * maybe(out, inside.after_mlp), behind.after_mlp)
    return normed(stream, model.norm)


LAYERS = {
    "before": PRE,
    "behind": replace(PRE, norms=POST_NORMS),
    "of sums": replace(PRE, norms=replace(POST_NORMS, of_sums=True)),
    "both": replace(PRE, norms=SANDWICH),
    "parallel": replace(PRE, norms=ONE_NORM, parallel=True),
    "parallel with two norms": replace(PRE, parallel=True),
    "no gate": replace(PRE, mlp=MLPSpec(inner=INNER, gated=False)),
}


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_what_it_says(kind: str, scale: float) -> None:
    model = make_model(config_of(LAYERS[kind], residual_scale=scale))
    torch.testing.assert_close(model.forward(PlainOps()), forward(model))


def test_a_layer_with_norms_before_costs_no_operation_for_what_it_lacks() -> None:
    ops = PlainOps()
    make_model(config_of(PRE)).forward(ops)
    assert ops.calls == ["add_norm", "attend", "add_norm", "mlp"] * 2 + ["add_norm"]


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, None), (1.0, 2.0), (0.5, 2.0)])
def test_the_model_owns_its_logits(scale: float, cap: float | None) -> None:
    model = make_model(config_of(PRE, logits_scale=scale, logits_cap=cap))
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(1))
    expected = scale * hidden @ model.embedding.head.weight.t()
    expected = expected if cap is None else cap * (expected / cap).tanh()
    torch.testing.assert_close(model.logits(PlainOps(), hidden), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_an_lm_head_may_have_a_bias(tied: bool) -> None:
    model = make_model(config_of(PRE, lm_head_bias=True, tie_word_embeddings=tied))
    head = model.embedding.head
    assert head.bias.shape == (16,)
    names = {name for name in model.named_weights() if name.startswith("lm_head.")}
    assert names == {"lm_head.bias"} | (set() if tied else {"lm_head.weight"})
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(1))
    expected = hidden @ head.weight.t() + head.bias
    torch.testing.assert_close(model.logits(PlainOps(), hidden), expected)


def test_a_norm_without_a_weight_multiplies_by_one_and_is_no_weight_of_the_model() -> None:
    model = make_model(config_of(PRE, norm=NormSpec(eps=1e-3, weight=False)))
    assert not [name for name in model.named_weights() if "norm" in name]
    assert all(torch.equal(norm.weight, torch.ones(HIDDEN)) for norm in model.layers[0].all_norms())
    torch.testing.assert_close(model.forward(PlainOps()), forward(model))


def test_names_of_weights_follow_the_spec() -> None:
    attention = replace(ATTENTION, qk_norm="row", sinks=True, output_bias=True)
    layer = LayerSpec(mixer=attention, mlp=MLPSpec(inner=INNER, gated=False), norms=SANDWICH)
    norm = NormSpec(kind="layer", bias=True)
    weights = make_model(config_of(layer, norm=norm, num_learned_positions=9)).named_weights()
    shapes = {name: tuple(views[0].shape) for name, views in weights.items()}
    own = {n.removeprefix("model.layers.1."): s for n, s in shapes.items() if "layers.1." in n}
    assert own == {
        "self_attn.q_proj.weight": (8, 8),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.v_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 8),
        "self_attn.o_proj.bias": (8,),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (4,),
        "self_attn.sinks": (2,),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
        **{f"{name}.weight": (8,) for name in ("before_a", "after_a", "before_m", "after_m")},
        **{f"{name}.bias": (8,) for name in ("before_a", "after_a", "before_m", "after_m")},
    }
    assert shapes["model.embed_positions.weight"] == (9, 8)


def test_the_scale_of_embeddings_is_a_number_of_the_weights_dtype() -> None:
    config = config_of(PRE, embedding_scale=3584**0.5, embeds_scale=0.1)
    storage = Storage(lambda shape, dtype: torch.empty(shape, dtype=dtype), torch.bfloat16)
    embedding = TokenEmbedding(config, storage)
    assert (embedding.scale, embedding.embeds_scale) == (59.75, 0.10009765625)
    assert TokenEmbedding(config_of(PRE), storage).scale == 1


def test_pre_norms_are_llamas() -> None:
    assert PRE.norms == PRE_NORMS
