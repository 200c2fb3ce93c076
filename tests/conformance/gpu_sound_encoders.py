"""Encoder-decoders of sounds of any length for the tests of `encoder_decoders`."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from conformance.encoder_decoders import COUNT, TEXT, Asked, Subject, make_subject
from support.sound_encoders import FIRST, RATE, RECIPES, make_sound_encoder, reference_tokens
from support.variants import slow
from support.whisper_models import make_sound

from shmllm.frontend.items.registry import processors_of_model
from shmllm.params.items import Item


@pytest.fixture(scope="module", params=[name if name in FIRST else slow(name) for name in RECIPES])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name, directory = request.param, tmp_path_factory.mktemp("sound_encoder")
    model = make_sound_encoder(directory, name)
    fields = json.loads((directory / "config.json").read_text())
    processor = processors_of_model(directory, fields)["audio"]
    seconds = (RECIPES[name].most_seconds, 0.4, 2.3)
    sounds = [make_sound(each, seed) for seed, each in enumerate(seconds)]

    def ask(sound: int, *text: int) -> Asked:
        prompt = [300, *text]
        found = processor.prepare(processor.open(name, (sounds[sound], RATE)))
        identity, span = sha256(found.data.tobytes()).digest(), (0, found.num_tokens)
        item = Item(identity, (span,), found.grid, found.data, "audio")
        wanted = reference_tokens(model, name, prompt, sounds[sound], COUNT)
        return Asked(prompt, (item,), [], wanted)

    asked = {"whole": ask(0), "short": ask(1), "long": ask(2, *TEXT), "same": ask(2, 7, 8, 9)}
    return make_subject(
        directory,
        model,
        asked,
        lambda prompt, penalty: reference_tokens(model, name, prompt, sounds[2], COUNT, penalty),
        num_blocks=200,
    )
