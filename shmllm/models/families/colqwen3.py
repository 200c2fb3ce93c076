"""ColQwen3: Qwen 3 VL and a projection of each token, if the files have one, for late interaction
with pages; the form in which several publish it, and vLLM reads it."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_vl
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec

PROJECTION = "embedding_proj_layer"
_WIDTHS = ("embed_dim", "dims", "dim", "projection_dim", "colbert_dim")
"""The names that its publishers give to the width of the projection."""


def configure(fields: Fields) -> ModelConfig:
    return with_projection(qwen3_vl.configure(fields), fields, None)


def with_projection(model: ModelConfig, fields: Fields, width: int | None) -> ModelConfig:
    """Returns the model with a projection of each token. Its bias may be left out of files.

    Args:
        model: the model.
        fields: the fields of config.json.
        width: the width if no field has one; None: there is no projection then.
    """
    whole = fields.whole
    given = next((name for name in _WIDTHS if whole.values.get(name) is not None), None)
    if given is not None:
        width = whole.integer(given)
    if width is None:
        return model
    dense = DenseSpec(name=PROJECTION, inputs=model.hidden_size, outputs=width, bias=True)
    return replace(
        model,
        head=HeadSpec(kind="projection", steps=(dense,)),
        zeros_if_absent=(*model.zeros_if_absent, f"{PROJECTION}.bias"),
    )
