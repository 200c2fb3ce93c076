"""Music Flamingo: Audio Flamingo 3 whose sounds know their times."""

from __future__ import annotations

from dataclasses import asdict, replace

from shmllm.models.audio.specs import AudioFlamingoTower, AudioSpec, MusicFlamingoTower
from shmllm.models.config import ModelConfig
from shmllm.models.families import audioflamingo3
from shmllm.models.fields import Fields
from shmllm.models.rope_config import RopeConfig

_THETA = 1200.0
_TYPES = ("audioflamingo3_encoder", "musicflamingo_encoder")


def configure(fields: Fields) -> ModelConfig:
    config = audioflamingo3.configure(fields, _TYPES)
    return replace(config, audio=None if config.audio is None else _timed(fields, config.audio))


def _timed(fields: Fields, audio: AudioSpec) -> AudioSpec:
    whole, tower = fields.whole, audio.tower
    assert isinstance(tower, AudioFlamingoTower), "Audio Flamingo 3 has such a tower"
    width, count = tower.hidden_size, tower.num_positions // 2
    rope = RopeConfig.from_fields(whole, count, width, theta=_THETA, partial=0.2)
    if rope.type != "default" or rope.sections:
        raise whole.error(f"rope type {rope.type!r} is not supported; supported: 'default'")
    if not count <= int(rope.theta) or 2 * rope.rotary_dim > width:
        raise whole.error(
            f"rope_parameters have no room for {count} positions and twice {rope.rotary_dim} of "
            f"{width} numbers: rope_theta is the largest position, and partial_rotary_factor at "
            "most a half"
        )
    timed = MusicFlamingoTower(
        **asdict(tower),
        rotary_dim=rope.rotary_dim,
        theta=rope.theta,
        seconds=4 * whole.number("audio_frame_step", 0.01),
    )
    return replace(audio, tower=timed, counts_parts=True)
