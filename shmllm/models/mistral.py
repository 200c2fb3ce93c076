"""Mistral: Llama without biases; every layer may have a sliding window."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Mistral differs from Llama only in its config: see its entry in the registry."""
