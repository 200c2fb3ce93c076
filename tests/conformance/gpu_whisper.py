"""Whisper for the tests of `encoder_decoders`."""

from __future__ import annotations

from hashlib import sha256

import pytest
from conformance.encoder_decoders import COUNT, TEXT, Asked, Subject, make_subject
from support.whisper_models import SECONDS, features, make_sound, make_whisper, reference_tokens

from shmllm.params.items import Item

POSITIONS = 50 * SECONDS
BEGIN = [301, 302, 305]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("whisper")
    model = make_whisper(directory, decoder_layers=2)
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((1.0, 0.4, 0.7))]

    def ask(sound: int, *text: int) -> Asked:
        prompt = [*BEGIN, *text]
        data = features([sounds[sound]])[0].T.contiguous().numpy()
        identity = sha256(data.tobytes()).digest()
        grid = (2 * POSITIONS, 1, 1)
        item = Item(identity, ((0, POSITIONS),), grid, data, "audio")
        wanted = reference_tokens(model, prompt, sounds[sound], COUNT)
        return Asked(prompt, (item,), [], wanted)

    asked = {"whole": ask(0), "short": ask(1), "long": ask(2, *TEXT), "same": ask(2, 7, 8, 9)}
    return make_subject(
        directory,
        model,
        asked,
        lambda prompt, penalty: reference_tokens(model, prompt, sounds[2], COUNT, penalty),
    )
