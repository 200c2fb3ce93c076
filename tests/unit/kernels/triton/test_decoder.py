"""Tests all layers of a decoder in one launch, under Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from conformance.decoder_kernel import ATTENTION, PLAIN, TILE, DecoderConformance, launched
from support import cooperative_interpreter
from support.variants import slow

from shmllm_kernels.gpu import decode_attention_kernel, decoder_kernel, decoder_product
from shmllm_kernels.gpu.decoder import run_layers

PROGRAMS = 3
MEETINGS_OF_A_LAYER = 5


class TestDecoder(DecoderConformance):
    pass


@pytest.mark.parametrize(
    "missing",
    [slow(n) if n > MEETINGS_OF_A_LAYER else n for n in range(1, 2 * MEETINGS_OF_A_LAYER)],
)
def test_no_meeting_is_there_for_nothing(draw, monkeypatch, missing) -> None:
    """Without one of them, some order of the programs gives other numbers."""
    case = DecoderConformance.case(draw, torch.float16, PLAIN)
    x = draw.normal(case.tokens, PLAIN.hidden, dtype=torch.float16)
    want = launched(case, x, case.copied())
    skipped = []

    def await_others(meeting) -> None:
        if int(meeting.arrivals.handle.data.item()) == missing * PROGRAMS:
            skipped.append(missing)
        else:
            await_arrivals(meeting)

    def differs(seed: int) -> bool:
        monkeypatch.setattr(cooperative_interpreter, "seeds", random.Random(seed))
        got, memory = x.clone(), case.memory(x, float("nan"))
        layers = case.decoder(case.copied())
        run_layers(got, layers, memory, case.starts, case.contexts, TILE, ATTENTION, PROGRAMS)
        return not torch.equal(got, want)

    await_arrivals = decoder_product.await_arrivals
    assert not differs(0)
    for module in (decode_attention_kernel, decoder_kernel, decoder_product):
        monkeypatch.setattr(module, "await_arrivals", await_others)
    assert any(differs(seed) for seed in range(1, 50))
    assert skipped


def test_a_program_that_fails_ends_the_launch(draw, monkeypatch) -> None:
    """The others do not wait for it."""
    case = DecoderConformance.case(draw, torch.float16, PLAIN)
    x = draw.normal(case.tokens, PLAIN.hidden, dtype=torch.float16)
    monkeypatch.setattr(decoder_kernel, "leave", None)
    with pytest.raises(TypeError, match="NoneType"):
        run_layers(
            x, case.decoder(case.copied()), case.memory(x), case.starts, case.contexts, TILE,
            ATTENTION, PROGRAMS,
        )  # fmt: skip
