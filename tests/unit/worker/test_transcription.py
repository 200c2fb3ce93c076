"""The rules of transcripts, compared with those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from shmllm.params.sampling import SamplingParams
from shmllm.worker.transcription import ARGUMENT, Rules, TranscriptionRules

VOCAB, END, NO_TIMESTAMPS, LATEST = 64, 30, 39, 10
BEGIN = NO_TIMESTAMPS + 1
RULES = {
    "suppress": [NO_TIMESTAMPS, 3],
    "suppress_first": [5],
    "timestamps": BEGIN,
    "latest_first": BEGIN + LATEST,
    "end": END,
}


def params_with(rules: Any) -> SamplingParams:
    return SamplingParams(extra_args={ARGUMENT: rules})


def own_logits(rules: dict[str, Any], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    processor = TranscriptionRules(None, torch.device("cpu"), False)
    function = processor.new_req_logits_processor(params_with(rules))
    assert function is not None
    found: torch.Tensor = function(output, logits.clone())
    return found


class CountedOperations(TorchDispatchMode):
    """Keeps the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "output",
    [
        [],
        [BEGIN],
        [BEGIN + 2],
        [BEGIN + 2, 7],
        [BEGIN, 7, 8, BEGIN + 4],
        [BEGIN, 7, BEGIN + 4, BEGIN + 4],
        [BEGIN, 7, BEGIN + 4, BEGIN + 6, 9],
        [7],
        [7, BEGIN + 3],
        [BEGIN, BEGIN + 3],
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_timestamps_follow_the_rules_of_transformers(output: list[int], seed: int) -> None:
    """Seeds make timestamps together more likely than text, or less."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator) * 3
    logits[BEGIN:] += 2 * (seed - 2)
    rules = RULES | {"suppress": [NO_TIMESTAMPS], "suppress_first": []}
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=LATEST,
        _detect_timestamp_from_logprob=True,
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    wanted = theirs(torch.tensor([[1, 2, *output]]), logits[None])[0]
    found = own_logits(rules, output, logits)
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    assert torch.equal(found[found > -torch.inf], logits[found > -torch.inf])


def test_suppressed_tokens() -> None:
    rules = {"suppress": [3, 10**6], "suppress_first": [5]}
    first, later = (own_logits(rules, output, torch.zeros(VOCAB)) for output in ([], [7]))
    assert (first == -torch.inf).nonzero().flatten().tolist() == [3, 5]
    assert (later == -torch.inf).nonzero().flatten().tolist() == [3]


def test_many_suppressed_tokens_cost_one_operation() -> None:
    rules = {"suppress": [*range(0, VOCAB - 20, 2)], "suppress_first": [5]}
    with CountedOperations() as counted:
        own_logits(rules, [7], torch.zeros(VOCAB))
    assert len(counted.names) < 10, counted.names


def test_requests_without_rules_have_no_processor() -> None:
    processor = TranscriptionRules(None, torch.device("cpu"), False)
    assert processor.new_req_logits_processor(SamplingParams()) is None
    assert not processor.is_argmax_invariant()


@pytest.mark.parametrize(
    "wrong",
    [
        *(7, {"suppress": ["a"]}, {"unknown": 1}, {"timestamps": -1}, {"end": True}),
        *({"suppress": 5}, {"suppress": "abc"}, {"suppress": [[1]]}, {"suppress_first": [2**31]}),
        *({"timestamps": 0}, {"latest_first": 2**64 - 1}),
    ],
)
def test_malformed_rules_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=ARGUMENT):
        TranscriptionRules.validate_params(params_with(wrong))


def test_fields() -> None:
    assert Rules.of(params_with(RULES)) == Rules(
        suppress=(NO_TIMESTAMPS, 3), suppress_first=(5,), timestamps=BEGIN,
        latest_first=BEGIN + LATEST, end=END,
    )  # fmt: skip
