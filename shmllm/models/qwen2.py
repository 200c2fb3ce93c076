"""Qwen 2 and 2.5: biases on q, k and v, sliding windows on the upper layers."""

from __future__ import annotations

from shmllm.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The output projection has no bias although q, k and v do."""

    output_bias = False
