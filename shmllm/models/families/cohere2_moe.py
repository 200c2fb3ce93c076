"""Command A+: Cohere 2 with experts beside attention, chosen by sigmoids or by a softmax.

Their sum and the output of an MLP that all tokens go to are added, or their mean is taken. The
first layers may have dense MLPs, and rotate although they have no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.cohere2 import NORMS, cohere_model
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    MOST_LAYERS,
    SLIDING,
    SPARSE,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_mlp_types,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec, NormSpec

_WIDTH_OF_DENSE = "prefix_dense_intermediate_size"


def configure(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", 0, minimum=0, maximum=MOST_LAYERS)
    kinds = read_mlp_types(fields, num_layers)
    if kinds is None:
        kinds = tuple(DENSE if index < num_dense else SPARSE for index in range(num_layers))
    mlp = read_mlp(fields)
    dense = replace(mlp, inner=fields.optional_integer(_WIDTH_OF_DENSE) or mlp.inner)
    feed_forwards: dict[str, MLPSpec | MoESpec] = {DENSE: dense}
    if SPARSE in kinds:
        feed_forwards[SPARSE] = _read_experts(fields, mlp)
    layers = [
        LayerSpec(mixer=mixer, mlp=feed_forwards[kind], norms=NORMS, parallel=True)
        for mixer, kind in zip(_mixers(fields, kinds, num_dense), kinds, strict=True)
    ]
    model = cohere_model(fields, layers, read_positions(fields, 8192))
    eps = fields.optional_number("rms_norm_eps")
    return model if eps is None else replace(model, norm=NormSpec(eps=eps))


def _mixers(fields: Fields, kinds: Sequence[str], num_dense: int) -> list[AttentionSpec]:
    """Returns the attention of each layer, whose feed-forwards are of these kinds."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, head_dim=128, bias=bias, output_bias=bias)
    positions = read_positions(fields, 8192)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, interleaved=True)
    of_dense = fields.integer("prefix_dense_sliding_window_pattern", 1)
    types = read_layer_types(fields, len(kinds))
    if types is None:
        pattern = fields.integer("sliding_window_pattern", 4)
        num_dense = min(num_dense, len(kinds))
        types = _types(num_dense, of_dense) + _types(len(kinds) - num_dense, pattern)
    windows = windows_by_type(fields, types, read_window(fields, 4096))
    return [
        replace(
            attention,
            window=window,
            rope=rope if window is not None or (kind == DENSE and of_dense == 1) else None,
        )
        for window, kind in zip(windows, kinds, strict=True)
    ]


def _types(count: int, pattern: int) -> tuple[str, ...]:
    return tuple(SLIDING if (index + 1) % pattern else FULL for index in range(count))


def _read_experts(fields: Fields, mlp: MLPSpec) -> MoESpec:
    experts = read_experts(fields, mlp.inner, num_experts=8, top_k=2)
    choice = fields.text("expert_selection_fn", "softmax")
    if choice == "softmax":
        experts = replace(experts, scoring="softmax_of_top")
    elif choice == "sigmoid":
        divides = fields.flag("norm_topk_prob", True)
        experts = replace(experts, scoring="sigmoid", renormalize=divides)
    else:
        raise fields.error(
            f"expert_selection_fn {choice!r} is not supported; supported: 'softmax', 'sigmoid'"
        )
    num_shared = fields.integer("num_shared_experts", 0, minimum=0)
    if not num_shared:
        return experts
    experts = replace(
        experts,
        shared=replace(mlp, inner=num_shared * mlp.inner),
        shared_name="shared_experts",
    )
    combination = fields.text("shared_expert_combination_strategy", "average")
    if combination not in ("average", "sum"):
        raise fields.error(
            f"shared_expert_combination_strategy {combination!r} is not supported; supported: "
            "'average', 'sum'"
        )
    is_mean = combination == "average"
    return replace(experts, weight_scale=0.5, halves_shared=True) if is_mean else experts
