"""Qwen 2.5 Omni: the thinker's part of a published config.json, and of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_models import make_omni
from support.model_helpers import assert_logits_close, load, our_logits
from support.quantized_checkpoints import awq, gptq, named, write_checkpoint
from support.variants import slow
from transformers import Qwen2_5OmniThinkerConfig

from shmllm.errors import EngineStartError
from shmllm.models.audio.omni_specs import Qwen2_5OmniAudioTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_config, read_fields
from shmllm.models.decoder import DecoderModel
from shmllm.models.rope_config import VideoTimes
from shmllm.models.vision.specs import VideoSpec, VisionSpec
from shmllm.models.vision.squares_specs import Qwen2_5Tower

OMNI_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "enable_audio_output": True,
    "enable_talker": True,
    "model_type": "qwen2_5_omni",
    "talker_config": {"architectures": ["Qwen2OmniTalkerForConditionalGeneration"]},
    "thinker_config": {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": {
            "activation_function": "gelu",
            "d_model": 1280,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "max_source_positions": 1500,
            "model_type": "qwen2_5_omni_audio_encoder",
            "n_window": 100,
            "num_hidden_layers": 32,
            "num_mel_bins": 128,
            "output_dim": 3584,
            "scale_embedding": False,
        },
        "audio_end_token_id": 151648,
        "audio_start_token_id": 151647,
        "audio_token_index": 151646,
        "eos_token_id": 151645,
        "image_token_index": 151655,
        "model_type": "qwen2_5_omni_thinker",
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": {
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2_5_omni_text",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        "user_token_id": 872,
        "video_token_index": 151656,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_channels": 3,
            "in_chans": 3,
            "intermediate_size": 3420,
            "model_type": "qwen2_5_omni_vision_encoder",
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
    },
    "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
    "torch_dtype": "bfloat16",
}
"""Fields as the files of the model's authors have them."""
VISION = VisionSpec(
    image_token=151655,
    tower=Qwen2_5Tower(
        hidden_size=1280,
        num_layers=32,
        num_heads=16,
        inner=3420,
        patch_size=14,
        num_frames=2,
        merge_size=2,
        activation="silu",
        theta=10000.0,
        window=4,
        full_layers=(7, 15, 23, 31),
        has_apart=True,
    ),
    merge_size=2,
    has_axes=True,
    video=VideoSpec(
        token=151656,
        processors=("Qwen2VLVideoProcessor",),
        in_one_piece=True,
        times=VideoTimes(25, is_aligned=True),
    ),
)
AUDIO = AudioSpec(
    token=151646,
    tower=Qwen2_5OmniAudioTower(
        hidden_size=1280,
        num_layers=32,
        num_heads=20,
        inner=5120,
        activation="gelu",
        num_mels=128,
        num_positions=1500,
        window=100,
    ),
)


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def changed(part: str | None, **fields: Any) -> dict[str, Any]:
    """OMNI_7B with other fields of its thinker, or of one of the thinker's parts."""
    whole = json.loads(json.dumps(OMNI_7B))
    thinker = whole["thinker_config"]
    (thinker if part is None else thinker[part]).update(fields)
    return whole


def values_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {name: views[0].clone() for name, views in model.named_weights().items()}


@pytest.mark.parametrize(
    "architecture", ["Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"]
)
def test_files_of_qwen_2_5_omni_are_read(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, OMNI_7B | {"architectures": [architecture]})
    assert config.architecture == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (3584, 28, 152064)
    assert (config.lm_head, config.tie_word_embeddings) == (True, False)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (151645,))
    assert set(config.layer_windows) == {None}
    (rope,) = config.ropes
    assert (rope.sections, rope.mixes_axes, rope.theta) == ((16, 24, 24), False, 1e6)
    assert config.attentions[0].num_kv_heads == 4
    assert (config.vision, config.audio) == (VISION, AUDIO)
    assert config.video_times == VideoTimes(25, is_aligned=True)
    assert AUDIO.num_embeddings((3000, 1, 1)) == 750


def test_a_sound_of_300_seconds_needs_the_memory_of_30_and_a_stream() -> None:
    tower = AUDIO.tower
    of_30_seconds = 3000 * (4 * tower.inner + 3 * tower.hidden_size) // 2
    assert tower.most_frames == 30_000
    assert tower.most_frames * tower.most_activations < of_30_seconds + 30_000 * 1281


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = Qwen2_5OmniThinkerConfig(vision_config={"hidden_size": 1280})
    names = ["Qwen2_5OmniThinkerForConditionalGeneration"]
    whole = {"architectures": names, "vision_config": {"hidden_size": 1280}}
    whole |= {"text_config": {"a": 1}, "audio_config": {"a": 1}}
    found, text = read(tmp_path, whole), theirs.text_config
    assert found == read(tmp_path, theirs.to_dict() | {"architectures": names})
    assert (found.vision, found.audio) == (VISION, AUDIO)
    assert found.num_layers == text.num_hidden_layers
    assert found.max_position_embeddings == text.max_position_embeddings
    assert found.tie_word_embeddings == theirs.tie_word_embeddings
    sliding = whole | {"text_config": {"use_sliding_window": True, "max_window_layers": 20}}
    assert read(tmp_path, sliding).layer_windows == (None,) * 20 + (32768,) * 8


def test_only_the_field_of_the_thinker_ties_the_lm_head(tmp_path: Path) -> None:
    own = changed("text_config", tie_word_embeddings=True)
    assert not read(tmp_path, own).tie_word_embeddings
    assert read(tmp_path, changed(None, tie_word_embeddings=True)).tie_word_embeddings


def test_fields_around_the_thinker_that_hold_for_it_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OMNI_7B | {"quantization_config": {"a": 1}}))
    found = read_config(tmp_path)
    assert found["quantization_config"] == {"a": 1}
    assert "talker_config" not in found
    overrides = {"thinker_config": {"audio_config": {"n_window": 50}, "seconds_per_chunk": 3}}
    whole = read_fields(tmp_path, overrides).whole.values
    assert (whole["audio_config"]["n_window"], whole["seconds_per_chunk"]) == (50, 3)
    assert whole["audio_config"]["d_model"] == 1280


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("audio_config", {"model_type": "whisper"}, "'whisper' is not supported; supported: qwen2"),
        ("audio_config", {"output_dim": 64}, r"output_dim \(64\) differs from .* \(3584\)"),
        ("audio_config", {"n_window": 1501}, "'n_window' must be an integer of at most 1,500"),
        ("audio_config", {"n_window": 0}, "'n_window' must be an integer of at least 1"),
        ("audio_config", {"d_model": 2, "encoder_attention_heads": 1}, r"\(2\) must be an even"),
        ("audio_config", {"activation_function": "relu"}, "'relu' is not supported"),
        ("vision_config", {"model_type": "qwen2_5_vl"}, "supported: qwen2_5_omni_vision_encoder"),
        ("vision_config", {"out_hidden_size": 64}, r"out_hidden_size \(64\) differs from"),
        ("text_config", {"model_type": "qwen2"}, "'qwen2' is not supported in Qwen2_5OmniThinker"),
        ("text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type 'default'"),
        (None, {"audio_token_index": 152064}, r"audio_token_index \(152064\) is no token"),
        (None, {"position_id_per_seconds": 0}, "'position_id_per_seconds' must be an integer"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str | None, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read(tmp_path, changed(part, **fields))


def test_a_thinker_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"config\.json: 'thinker_config' must be an object"):
        read(tmp_path, OMNI_7B | {"thinker_config": [1]})


def test_the_thinker_of_another_model_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="unknown architecture 'Qwen9OmniModel'"):
        read(tmp_path, OMNI_7B | {"architectures": ["Qwen9OmniModel"]})


@pytest.mark.parametrize("newer", [False, True])
def test_the_other_parts_of_a_checkpoint_are_left_out(newer: bool, tmp_path: Path) -> None:
    """Names are those of published files, or of transformers' modules."""
    reference = make_omni(tmp_path)
    before = values_of(load(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = reference.state_dict() if newer else load_file(path)
    others = {"talker.lm_head.weight", "talker.model.norm.weight", "token2wav.code2wav.a.bias"}
    save_file(
        {f"thinker.{name}": tensor for name, tensor in tensors.items()}
        | {name: torch.ones(3) for name in others},
        path,
    )
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = values_of(load(tmp_path))
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
        slow({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
    ],
    ids=["gptq", "awq"],
)
def test_a_quantized_checkpoint_has_the_names_of_the_whole_model(
    config: dict[str, Any], make: Any, tmp_path: Path
) -> None:
    """As published ones: the matrices of layers are packed, towers are not."""
    torch.manual_seed(5)
    make_omni(tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in values.items():
        module = f"thinker.{name}".removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            weight = make(tuple(tensor.shape))
            values[name] = weight.values
            stored |= named(module, weight)
        else:
            stored[f"thinker.{name}"] = tensor
    save_file(values, path)
    plain = load(tmp_path)
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    packed = load(write_checkpoint(tmp_path, config, stored))
    tokens = list(range(5, 45))
    assert_logits_close(our_logits(packed, tokens), our_logits(plain, tokens), 1e-4)
    own, theirs = (values_of(model)["visual.merger.mlp.0.weight"] for model in (packed, plain))
    assert torch.equal(own, theirs)


def test_updates_may_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    reference = make_omni(tmp_path)
    model = load(tmp_path)
    parameters = {f"thinker.{name}": 2 * value for name, value in reference.named_parameters()}
    written = model.load_weights(parameters.items())
    assert model.written(written) == set(model.named_weights())
    view = model.named_weights()["visual.blocks.1.attn.k.weight"][0]
    assert torch.equal(view, parameters["thinker.model.visual.blocks.1.attn.k.weight"])
