"""Updates of all weights under the names of transformers' modules."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from shmllm.models.decoder import DecoderModel


def update_from_modules(model: DecoderModel, reference: PreTrainedModel) -> None:
    """Overwrites all weights with those of a model of transformers, under the names of its state,
    and checks that these are all."""
    for views in model.named_weights().values():
        for view in views:
            view.copy_(torch.full_like(view.clone(), float("nan")))
    state = reference.state_dict()
    model.weights_lost()
    model.load_weights(state.items())
    assert not model.missing
