"""Makes models of transformers' classes from their configurations."""

from __future__ import annotations

from typing import Any

from support.remote_mixtures import Step3p5ForCausalLM
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel


def model_of(config: Any, **options: Any) -> PreTrainedModel:
    """A random language model of a configuration; the Auto class lacks some."""
    make: Any = AutoModelForCausalLM.from_config  # it has no annotations
    if config.model_type == "mistral4":
        make = Mistral4ForCausalLM._from_config
    if config.model_type == "step3p5":
        make = Step3p5ForCausalLM._from_config
    model: PreTrainedModel = make(config, **options)
    return model
