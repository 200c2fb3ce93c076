"""What images change in a model's steps on a CPU: their tokens' positions on three axes, and
attention up to an image's end. Compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.item_models import (
    ITEMS,
    LENGTH,
    MADE,
    item_ends_of,
    items_config,
    make_items_model,
    positions_of,
    wanted_logits,
)
from support.model_helpers import allocate, assert_logits_close, make_program
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.weights import load_weights
from shmllm.worker.rope_positions import PlacedGrid

TOKENS = [(3 * index) % 90 + 5 for index in range(LENGTH)]
CHUNKS = {
    "whole": [LENGTH],
    "behind images": [15, 7, 14, 8],
    "decodes": [36, *[1] * (LENGTH - 36)],
}
INSIDE_IMAGES = {"inside": [7, 12, 11, 14], "tokens": [1] * LENGTH}
CASES = [
    *product(MADE, CHUNKS),
    # An image whose tokens see each other is never cut.
    *product(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), INSIDE_IMAGES),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in MADE}
    return {name: (make_items_model(name, at), at) for name, at in directories.items()}


def load(directory: Path, config: ModelConfig) -> DecoderModel:
    model = create_model(config, torch.float32, allocate)
    load_weights(model, directory, None)
    return model


@torch.inference_mode()
def logits_of(
    model: DecoderModel,
    chunks: list[int],
    items: Sequence[PlacedGrid] | None,
) -> Tensor:
    """[tokens, vocab] of TOKENS, computed in some steps; None: without a word about images."""
    program, batch = make_program(model, LENGTH)
    batch.token_ids[0, :LENGTH] = TOKENS
    done, found = 0, []
    for count in chunks:
        plan = StepPlan(1, rows=[0], starts=[done], counts=[count], num_tokens=count)
        inputs = batch.inputs(plan)
        part = slice(done, done + count)
        if items is not None:
            inputs.rope_positions = positions_of(items, LENGTH)[:, part]
            inputs.item_ends = item_ends_of(items, LENGTH)[part]
        program.inputs.fill(inputs)
        hidden, _ = program.run(inputs)
        found.append(program.compute_logits(hidden))
        done += count
    return torch.cat(found)


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_logits_equal_those_of_transformers(
    made: dict[str, tuple[Any, Path]], name: str, chunks: str
) -> None:
    reference, directory = made[name]
    model = load(directory, items_config(directory))
    with torch.inference_mode():
        wanted = wanted_logits(name, reference, TOKENS, ITEMS)
        plain = wanted_logits(name, reference, TOKENS, [])
    assert float((wanted - plain).abs().max()) > 0.1, "images matter"
    whole = logits_of(model, CHUNKS["whole"], ITEMS)
    assert_logits_close(whole, wanted, 2e-5)
    assert torch.equal(logits_of(model, (CHUNKS | INSIDE_IMAGES)[chunks], ITEMS), whole)


@pytest.mark.parametrize("name", MADE)
def test_text_has_the_bits_of_a_model_that_knows_no_images(
    made: dict[str, tuple[Any, Path]], name: str
) -> None:
    directory, config = made[name][1], items_config(made[name][1])

    def plainly(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            return mixer
        assert mixer.rope is not None
        rope = replace(mixer.rope, sections=(), mixes_axes=False)
        return replace(mixer, rope=rope, ahead=0)

    plain = config.with_mixers(plainly)
    assert plain != config
    for chunks in ([LENGTH], [20, *[1] * (LENGTH - 20)]):
        wanted = logits_of(load(directory, plain), chunks, None)
        for items in (None, []):
            found = logits_of(load(directory, config), chunks, items)
            assert torch.equal(found, wanted)


def test_a_model_whose_images_see_themselves_is_no_encoder(made: Any) -> None:
    config = items_config(made["gemma3"][1])
    assert not config.both_ways
    encoder = [replace(each, mixer=replace(each.mixer, ahead=None)) for each in config.layers]
    assert replace(config, layers=tuple(encoder)).both_ways
    assert np.all(item_ends_of(ITEMS, LENGTH)[17:36] == [22] * 5 + [36] * 14)
