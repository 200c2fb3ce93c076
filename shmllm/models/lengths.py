"""What of a model depends on the length of its requests: the angles of longrope."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AttentionSpec, LatentAttentionSpec, MixerSpec


def for_length(config: ModelConfig, max_length: int) -> ModelConfig:
    """Returns the configuration of a model for requests of at most `max_length` tokens."""

    def lengthened(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec | LatentAttentionSpec):
            return mixer
        rope = mixer.rope
        if rope is None or rope.type != "longrope":
            return mixer
        return replace(mixer, rope=replace(rope, max_length=max_length))

    return config.with_mixers(lengthened)
