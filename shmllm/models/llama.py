"""Llama 1 to 3.x: the shared decoder without changes."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The config decides on biases: ``attention_bias`` for q, k, v and o, ``mlp_bias`` for the
    MLP."""
