"""Qwen 3: no biases by default; query and key heads are normalised."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """q_norm and k_norm act on each head, before the rotary embedding."""

    qk_norm = True
