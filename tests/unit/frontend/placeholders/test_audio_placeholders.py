"""Prompts with sounds are expanded as transformers' processor expands them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
OTHER = {"audio_token": "<snd>", "audio_bos_token": "<from>", "audio_eos_token": "<to>"}
ARCHITECTURE = {"architectures": ["Qwen2AudioForConditionalGeneration"]}
TEXTS = ["{}", "Audio 1: {}\nWhat is it?", "{}{}", "Audio 1: {}\n\nAudio 2: {}\n", " {} \n{} "]
RANDOM = np.random.default_rng(4)
SOUNDS = [(RANDOM.standard_normal(n) * 0.1).astype(np.float32) for n in (7000, 48000, 321, 961)]
ORDERS = [(0, 1), (1, 0), (2, 3)]


class Model:
    """A processor of transformers, and what we make of its files."""

    def __init__(self, tokenizer: Any, directory: Path) -> None:
        extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=3)
        self.theirs = Qwen2AudioProcessor(extractor, tokenizer)
        self.tokenizer = tokenizer
        extractor.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        audio = {"num_mel_bins": 16, "max_source_positions": 150}
        config = Qwen2AudioConfig(
            audio_config=audio, audio_token_id=self.theirs.audio_token_id
        ).to_dict()
        self.ours = processors_of_model(directory, config | ARCHITECTURE)["audio"]

    def prepare(self, sound: Any) -> Any:
        return self.ours.prepare(self.ours.open("audio", sound))

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


@pytest.fixture(params=["usual names", "other names"])
def model(
    request: pytest.FixtureRequest, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> Model:
    if request.param == "usual names":
        return Model(make_tokenizer(MARKS), tmp_path)
    return Model(make_tokenizer([*OTHER.values()], **OTHER), tmp_path)


def test_marks_are_those_of_the_tokenizer(model: Model) -> None:
    theirs = model.theirs
    expected = theirs.audio_bos_token + theirs.audio_token + theirs.audio_eos_token
    assert model.ours.mark == expected
    assert model.ours.token_id == theirs.audio_token_id


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("order", ORDERS)
def test_prompts_are_expanded_as_transformers_expands_them(
    model: Model, form: str, order: tuple[int, int]
) -> None:
    sounds = [SOUNDS[i] for i in order[: form.count("{}")]]
    prompt = form.format(*[model.ours.mark] * len(sounds))
    found = model.theirs(text=prompt, audio=sounds, sampling_rate=16000)
    expected = found["input_ids"][0]
    items = [model.prepare(each) for each in sounds]

    text = model.ours.expand_text("prompt", prompt, items)
    assert text == model.tokenizer.decode(expected, clean_up_tokenization_spaces=False)
    assert model.encode(text) == expected
    ids = model.ours.expand_ids("prompt", model.encode(prompt), items, model.encode)
    assert ids == expected
    assert model.ours.expand_ids("prompt", expected, items, model.encode) == expected

    masks = np.asarray(found["feature_attention_mask"]).sum(1)
    assert [item.grid for item in items] == [(frames, 1, 1) for frames in masks]
    runs = model.ours.runs("prompt", expected, items)
    for item, intervals in zip(items, runs, strict=True):
        ((begin, end),) = intervals
        assert end - begin == item.num_tokens
        assert set(expected[begin:end]) == {model.ours.token_id}


def test_other_numbers_of_marks_are_refused_with_both_numbers(model: Model) -> None:
    items = [model.prepare(SOUNDS[0])] * 2
    with pytest.raises(RequestError, match=r"prompt has 2 audios, and its text .* 1 times; write"):
        model.ours.expand_text("prompt", model.ours.mark, items)
    ids = model.encode(model.ours.mark)
    with pytest.raises(RequestError, match=r"prompt has 2 audios: its ids need .* have 1 and 1"):
        model.ours.expand_ids("prompt", ids, items, model.encode)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 6, 7, 8, 299, 300])
def test_counts_are_those_of_transformers(frames: int, tmp_path: Path) -> None:
    """The formula is that of `Qwen2AudioProcessor._process_audio`."""
    placeholder = placeholders_of_model(tmp_path, ARCHITECTURE)["audio"]
    assert placeholder.count((frames, 1, 1)) == (((frames - 1) // 2 + 1) - 2) // 2 + 1


def test_defaults_are_those_of_real_files(tmp_path: Path) -> None:
    placeholder: Any = placeholders_of_model(tmp_path, ARCHITECTURE)["audio"]
    assert (placeholder.mark, placeholder.token_id) == (MARK, 151646)
    assert (placeholder.num_mels, placeholder.most_frames) == (128, 3000)
    older = ARCHITECTURE | {"audio_token_index": 7}
    assert placeholders_of_model(tmp_path, older)["audio"].token_id == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_config": [1]}, "'audio_config' must be an object"),
        ({"audio_config": {"num_mel_bins": 0}}, "'num_mel_bins' must be an integer"),
        ({"audio_config": {"max_source_positions": "a"}}, "'max_source_positions' must be an int"),
        ({"audio_config": {"a": 1}, "audio_token_id": -1}, "'audio_token_id' must be an integer"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        placeholders_of_model(tmp_path, ARCHITECTURE | fields)
