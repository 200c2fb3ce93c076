"""Mistral: Llama without biases; every layer may have a sliding window."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Differs from Llama in its config only: see the registry's entry."""
