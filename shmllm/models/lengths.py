"""What of a model depends on the length of its requests: the angles of longrope, for how many
positions there are biases of queries and keys, and how many entries a token attends to at most."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.bias_specs import RelationBiases
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AnyAttention, AttentionSpec, MixerSpec


def for_length(config: ModelConfig, max_length: int) -> ModelConfig:
    """Returns the configuration of a model for requests of at most `max_length` tokens."""

    def lengthened(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AnyAttention):
            return mixer
        if isinstance(mixer, AttentionSpec) and isinstance(mixer.biases, RelationBiases):
            return replace(mixer, biases=replace(mixer.biases, num_positions=max_length))
        if isinstance(mixer, CompressedAttentionSpec):
            mixer = replace(mixer, num_positions=max_length)
        rope = mixer.rope
        if rope is None or rope.type != "longrope":
            return mixer
        return replace(mixer, rope=replace(rope, max_length=max_length))

    return config.with_mixers(lengthened)
