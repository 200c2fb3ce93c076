"""Granite Speech: features, embeddings of sounds and the adapter for them, compared with
transformers; its fields and names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import lora_adapters
from support.audio_families import GRANITE_SPEECH_SETTINGS
from support.audio_models import RATE, make_audio_model, reference_tokens
from support.model_helpers import allocate, assert_logits_close, load, our_logits, reference_logits
from support.sound_checks import check_embeddings, embed, noise, prepared, read_config
from support.sounds_alone import granite_features
from support.tower_checks import same_on_all_threads
from support.variants import slow

from shmllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from shmllm.config.load import with_only_text
from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.formats.audio_settings import MOST_SECONDS
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.audio.conformer_specs import GraniteSpeechTower, QFormer
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights

SPEC = AudioSpec(
    token=49155,
    has_adapter=True,
    tower=GraniteSpeechTower(
        hidden_size=1024,
        num_layers=10,
        num_heads=8,
        head_dim=128,
        inner=4096,
        num_mels=160,
        num_classes=42,
        block=200,
        most_distance=512,
        kernel=15,
        expansion=2,
        collected=(),
        projector=QFormer(
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            inner=3072,
            activation="gelu",
            eps=1e-12,
            reads_every=2,
            window=15,
            num_queries=3,
        ),
    ),
)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "even kernel": ({"conv_kernel_size": 4, "conv_expansion_factor": 1}, {}),
    "one layer": ({"num_layers": 1, "dim_head": None}, {"tie_word_embeddings": True}),
    "wider MLPs": ({"feedforward_mult": 3, "output_dim": 9}, {}),
}
SECONDS = [0.02, 0.05, 0.31, 1.0, 2.3]
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def check(directory: Path, reference: Any, model: DecoderModel, seconds: float) -> None:
    item, features = prepared(directory, noise(seconds)), granite_features(noise(seconds))
    assert item.grid == (len(features), 1, 1)
    np.testing.assert_allclose(item.data, features, rtol=0, atol=5e-6)
    check_embeddings(directory, reference, model, seconds)


@pytest.fixture(scope="module", params=["granite_speech", "granite_speech_plus"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, DecoderModel]:
    """Where a model is, transformers' and ours."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_audio_model(directory, request.param), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
def test_features_and_embeddings_equal_transformers(seconds: float, subject: Any) -> None:
    """Of less than a block, of some, and of some and a rest."""
    check(*subject, seconds)


@pytest.mark.slow
def test_features_equal_torchaudio(tmp_path: Path) -> None:
    """What the extractor of transformers makes with torchaudio, also how many embeddings it
    expects."""
    pytest.importorskip("torchaudio")
    extractor = transformers.GraniteSpeechFeatureExtractor()
    (tmp_path / "preprocessor_config.json").write_text(extractor.to_json_string())
    config = {"architectures": ["GraniteSpeechForConditionalGeneration"]}
    audio = processors_of_model(tmp_path, config)["audio"]
    for seconds in (0.02, *np.arange(1, 200) / 37):
        samples = noise(float(seconds))
        wanted = extractor([samples])
        item = audio.prepare(audio.open("a sound", (samples, RATE)))
        np.testing.assert_allclose(item.data, wanted["input_features"][0], rtol=0, atol=5e-6)
        assert [item.num_tokens] == wanted["audio_embed_sizes"]


def test_logits_of_text_equal_transformers(subject: Any) -> None:
    _, reference, model = subject
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize("variant", [*map(slow, VARIANTS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    encoder, outer = VARIANTS[variant]
    reference = make_audio_model(tmp_path, "granite_speech", outer=outer, **encoder)
    model = load(tmp_path)
    check(tmp_path, reference, model, 0.7)
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def test_the_number_of_threads_changes_no_bit(subject: Any) -> None:
    directory, _, model = subject
    item = prepared(directory, noise(1.1))
    same_on_all_threads(model.towers["audio"], lambda: embed(model, item))


def test_names_of_modules_reach_every_weight(subject: Any, tmp_path: Path) -> None:
    directory, reference, model = subject
    for path in directory.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    modules = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert "model.encoder.layers.0.conv.batch_norm.num_batches_tracked" in modules
    save_file(modules, tmp_path / "model.safetensors")
    for name, views in load(tmp_path).named_weights().items():
        assert torch.equal(views[0], model.named_weights()[name][0])
    fields = read_fields(tmp_path, with_only_text({}, True))
    without = create_model(ModelConfig.from_fields(fields, tmp_path), torch.float32, allocate)
    load_weights(without, tmp_path)
    assert without.towers == {}


def test_sounds_of_other_lengths_are_refused(subject: Any) -> None:
    with pytest.raises(RequestError, match="too short: it has 256 samples"):
        prepared(subject[0], np.ones(256, np.float32))
    with pytest.raises(RequestError, match="the model hears 600 at once"):
        prepared(subject[0], np.zeros(MOST_SECONDS * RATE + 1, np.float32))


def make_with_adapter(directory: Path) -> tuple[Any, Any]:
    """A model with an adapter for sounds in a directory, and what both amount to."""
    reference = make_audio_model(directory, "granite_speech", outer={"has_lora_adapter": True})
    modules = lora_adapters.linear_modules(reference)
    shapes = {name: modules[name] for name in modules if name.endswith(("q_proj", "v_proj"))}
    tensors = lora_adapters.draw(shapes, factor=0.8)
    lora_adapters.write(directory, tensors)
    return reference, lora_adapters.merged(reference, tensors, 2.0)


def test_prompts_with_sounds_have_the_models_adapter(tmp_path: Path) -> None:
    reference, merged = make_with_adapter(tmp_path)
    sound = noise(0.5)
    heard = {"prompt": "Hear <|audio|>!", "multi_modal_data": {"audio": (sound, RATE)}}
    options: dict[str, Any] = {"multiprocess": False, "num_threads": 1}
    with LLM(str(tmp_path), enable_lora=True, **options) as llm:
        prompts = [heard, "only text", heard]
        first, text, again = llm.generate(prompts, GREEDY, use_tqdm=False)
        wanted = reference_tokens(merged, first.prompt_token_ids, [sound], 8)
        assert list(first.outputs[0].token_ids) == wanted
        assert wanted != reference_tokens(reference, first.prompt_token_ids, [sound], 8)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        plain = reference_tokens(reference, text.prompt_token_ids, [], 8)
        assert list(text.outputs[0].token_ids) == plain
        (streamed,) = [o for o in llm.stream([heard], GREEDY) if o.finished]
        assert streamed.outputs[0].token_ids == first.outputs[0].token_ids
    with LLM(str(tmp_path), **options) as llm:
        with pytest.raises(RequestError, match=r"an adapter for prompts with sounds, in .*: start"):
            llm.generate(heard, GREEDY, use_tqdm=False)
        (output,) = llm.generate("only text", GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == plain


def test_chunks_behind_a_sound_have_the_models_adapter(tmp_path: Path) -> None:
    _, merged = make_with_adapter(tmp_path)
    sound = noise(0.5)
    heard = {"prompt": "Hear <|audio|>!", "multi_modal_data": {"audio": (sound, RATE)}}

    async def chunks() -> AsyncIterator[Any]:
        for chunk in (heard, "and now", heard):
            yield chunk

    async def run() -> list[RequestOutput]:
        options: dict[str, Any] = {"multiprocess": False, "num_threads": 1, "enable_lora": True}
        async with AsyncLLM(str(tmp_path), **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            outputs = [output async for output in llm.generate(chunks(), params)]
        return [output for output in outputs if output.outputs[0].finish_reason is not None]

    first, *others = asyncio.run(run())
    for output, sounds in zip((first, *others), ([sound], [sound], [sound] * 2), strict=True):
        wanted = reference_tokens(merged, output.prompt_token_ids, sounds, 4)
        assert list(output.outputs[0].token_ids) == wanted


def whole(name: str = "GraniteSpeech", **fields: Any) -> dict[str, Any]:
    """config.json of transformers' defaults, but for the width that the projector reads."""
    projector = {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}
    found = getattr(transformers, f"{name}Config")(projector_config=projector | fields).to_dict()
    return found | {"architectures": [f"{name}ForConditionalGeneration"]}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    some = {"text_config": {"a": 1}, "encoder_config": {"a": 1}}
    some |= {"projector_config": {"encoder_hidden_size": 1024}, "vocab_size": 50000}
    own = whole()
    own["text_config"]["vocab_size"] = some["text_config"]["vocab_size"] = 50000
    found = read_config(tmp_path, some | {"architectures": own["architectures"]})
    theirs = read_config(tmp_path, own)
    assert found.audio == theirs.audio == SPEC
    assert found.layers == theirs.layers
    some["encoder_config"] = {"hidden_size": 1024, "num_hidden_layers": 10, "num_mel_bins": 160}
    assert read_config(tmp_path, some | {"architectures": own["architectures"]}).audio == SPEC
    assert (found.hidden_size, found.norm) == (theirs.hidden_size, theirs.norm)
    assert (found.tie_word_embeddings, theirs.tie_word_embeddings) == (True, True)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("encoder_config", {"model_type": "whisper"}, "supported: granite_speech_encoder, "),
        ("encoder_config", {"context_size": 600}, r"context_size \(600\) exceeds max_pos_emb"),
        ("encoder_config", {"num_heads": 3}, r"num_heads \(3\) must divide hidden_dim"),
        ("encoder_config", {"cat_hidden_layers": [3]}, r"encoder_hidden_size \(1024\) differs"),
        ("encoder_config", {"cat_hidden_layers": [10]}, "must list different layers below 10"),
        ("encoder_config", {"cat_hidden_layers": "3"}, "must be a list of layers, not '3'"),
        ("projector_config", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("projector_config", {"use_qformer_text_input": True}, "use_qformer_text_input true is"),
        ("projector_config", {"encoder_hidden_size": 9}, r"encoder_hidden_size \(9\) differs from"),
        ("text_config", {"model_type": "granitemoe"}, "supported: granite"),
        (None, {"downsample_rate": 4}, r"downsample_rate \(4\) must divide window_size \(15\)"),
        (None, {"audio_token_index": 32000}, "is no token of a vocabulary of 32000"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str | None, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    found = whole() | {"audio_token_index": 3}
    (found if part is None else found[part]).update(fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_mels": 9}, "takes 16 features of up to 30000 frames, the feature extractor makes 18"),
        ({"projector_window_size": 9}, "makes 6 / 3 embeddings of a window, the .* expects 9 / 3"),
        ({"win_length": 600}, "n_fft must be even, and at least win_length"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "needs Granite Speech's feature"),
    ],
)
def test_settings_that_do_not_suit_are_refused(
    settings: dict[str, Any], message: str, subject: Any, tmp_path: Path
) -> None:
    config = json.loads((subject[0] / "config.json").read_text())
    given = json.dumps(GRANITE_SPEECH_SETTINGS | settings)
    (tmp_path / "preprocessor_config.json").write_text(given)
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, config)


def test_settings_are_read_where_its_processor_writes_them(tmp_path: Path) -> None:
    content = {"audio_processor": GRANITE_SPEECH_SETTINGS, "audio_token": "<|audio|>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    settings = read_audio_settings(tmp_path)
    assert settings is not None
    assert settings.num_mels == 16
