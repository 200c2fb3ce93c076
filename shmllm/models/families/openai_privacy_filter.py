"""OpenAI's privacy filter: gpt-oss whose tokens attend to those near them on both sides, with other
rotations and another order of gates and ups, and a classifier of each token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.families import gpt_oss
from shmllm.models.families.gpt_oss import read_clamped_experts, read_sinks
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.pooled import classifier, read_labels
from shmllm.models.readers import read_model, read_norm, read_num_layers, read_positions
from shmllm.models.registry import Purpose, purpose_of

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_KINDS = (
    *("account_number", "private_address", "private_date", "private_email", "private_person"),
    *("private_phone", "private_url", "secret"),
)
_LABELS = ("O", *(f"{place}-{kind}" for kind in _KINDS for place in "BIES"))
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 200_064,
    "hidden_size": 640,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    if fields.values.get("sliding_window", 0) is None:
        raise fields.error("sliding_window null is not supported")
    positions, ahead = read_positions(fields, 131_072), fields.integer("sliding_window", 128)
    attention = read_sinks(fields, positions)
    assert attention.rope is not None, "it has a rotation"
    rope = replace(attention.rope, interleaved=True)
    attention = replace(attention, rope=rope, ahead=ahead, window=ahead + 1)
    layer = LayerSpec(mixer=attention, mlp=read_clamped_experts(fields))
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = read_norm(fields, default=1e-5)
    return replace(model, norm=norm, lm_head=False, head=_head(fields), eos_token_ids=())


def _head(fields: Fields) -> HeadSpec | None:
    """Returns the classifier of tokens, if the architecture has it."""
    if purpose_of(architecture_name(fields)) is not Purpose.CLASSIFY_TOKENS:
        return None
    if not fields.table("id2label") and fields.integer("num_labels", len(_LABELS)) == len(_LABELS):
        names = {str(index): label for index, label in enumerate(_LABELS)}
        fields = fields.with_values(fields.values | {"id2label": names})
    dense = DenseSpec(
        name="score",
        inputs=fields.integer("hidden_size"),
        outputs=len(read_labels(fields)),
        bias=fields.flag("token_classification_bias", True),
    )
    return classifier(fields, dense)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.arranged import AlternatedHalves

    own = gpt_oss.named_weights(weights, config)
    return {
        name: tuple(AlternatedHalves(view) for view in views) if ".gate_up_proj" in name else views
        for name, views in own.items()
    }
