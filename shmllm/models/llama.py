"""Llama 1 to 3.x: the decoder as it is."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """Biases follow the config: ``attention_bias`` for q, k, v and o, ``mlp_bias``."""
