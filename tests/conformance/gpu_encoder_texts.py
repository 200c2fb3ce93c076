"""Encoder-decoders of texts for the tests of `encoder_decoders`."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.encoder_decoders import COUNT, TEXT, Asked, Subject, make_subject
from support.encoder_texts import LENGTH, RECIPES, make_encoder_decoder, reference_tokens
from support.variants import slow

FIRST = {"bart", "t5"}
"""Those whose kernels differ."""


@pytest.fixture(scope="module", params=[name if name in FIRST else slow(name) for name in RECIPES])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("encoder_decoder")
    model = make_encoder_decoder(directory, request.param)
    draw = np.random.default_rng(0)
    texts = [draw.integers(5, 290, count).tolist() for count in (LENGTH, 5, 33)]

    def ask(text: int, *prompt: int) -> Asked:
        begin = [model.config.decoder_start_token_id, *prompt]
        wanted = reference_tokens(model, texts[text], begin, COUNT)
        return Asked(begin, (), texts[text], wanted)

    asked = {"whole": ask(0), "short": ask(1), "long": ask(2, *TEXT), "same": ask(2, 7, 8, 9)}
    return make_subject(
        directory,
        model,
        asked,
        lambda prompt, penalty: reference_tokens(model, texts[2], prompt, COUNT, penalty),
    )
