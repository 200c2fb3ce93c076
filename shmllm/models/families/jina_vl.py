"""jina-reranker-m0: Qwen 2 VL and two projections of the last token, for pairs of texts and images.

The template, the token behind it and what is subtracted from logits are those of vLLM 0.33.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import colqwen2, qwen2_vl
from shmllm.models.families.colqwen2 import read_vision
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec, PairSpec

__all__ = ["configure", "read_vision"]

_TEMPLATE = "**Document**:\n{document}\n**Query**:\n{query}"
_SCORE_TOKEN = 100
_LOGIT_MEAN = 2.65


def configure(fields: Fields) -> ModelConfig:
    model = qwen2_vl.configure(fields)
    if model.vocab_size <= _SCORE_TOKEN:
        raise fields.error(f"vocab_size must be above {_SCORE_TOKEN}, the token that is scored")
    width = model.hidden_size
    first = DenseSpec(name="score.0", inputs=width, outputs=width, bias=True, activation="relu")
    last = DenseSpec(name="score.2", inputs=width, outputs=1, bias=True)
    head = HeadSpec(
        kind="classifier",
        steps=(first, last),
        labels=("LABEL_0",),
        activation="sigmoid",
        logit_mean=_LOGIT_MEAN,
        pairs=PairSpec(template=_TEMPLATE, end=(_SCORE_TOKEN,)),
    )
    return replace(model, head=head, vision=colqwen2.read_vision(fields, model))
