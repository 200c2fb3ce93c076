"""What programs do with results of pooling requests, and with other results: copy and convert."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest

from shmllm import CompletionOutput, Logprob, LoRARequest, RequestOutput
from shmllm.outputs.beam_search import BeamSearchOutput, BeamSearchSequence
from shmllm.outputs.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shmllm.outputs.request import RequestMetrics, WeightVersionSpan

VECTOR = np.array([0.5, -0.25], np.float32)

RESULTS = [
    RequestOutput(
        "0",
        "a",
        [1],
        [None],
        [
            CompletionOutput(
                0,
                "b",
                [2],
                -0.5,
                [{2: Logprob(-0.5, 1)}],
                "stop",
                None,
                [WeightVersionSpan(0, 0, 1)],
            )
        ],
        True,
        RequestMetrics(arrival_time=5.0),
        LoRARequest("poet", 1, "/poet"),
    ),
    BeamSearchOutput([BeamSearchSequence([1, 2], [{2: Logprob(-0.5, 1)}])]),
    EmbeddingRequestOutput("0", EmbeddingOutput(VECTOR), [1]),
    ClassificationRequestOutput("0", ClassificationOutput(VECTOR), [1]),
    ScoringRequestOutput("0", ScoringOutput(0.5), [1]),
    PoolingRequestOutput("0", PoolingOutput(VECTOR), [1]),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda each: type(each).__name__)
def test_copies_are_equal(result):
    for copied in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert type(copied) is type(result)
        assert copied == result


@pytest.mark.parametrize("result", RESULTS[:-1], ids=lambda each: type(each).__name__)
def test_a_result_becomes_json(result):
    json.dumps(asdict(result))


@pytest.mark.parametrize("result", RESULTS, ids=lambda each: type(each).__name__)
def test_results_have_a_dict_of_attributes(result):
    first, *_ = vars(result)
    assert vars(result)[first] == getattr(result, first)
    for part in getattr(result, "sequences", None) or [result.outputs]:
        part = part[0] if isinstance(part, list) else part
        vars(part)["added"] = 1
        assert part.added == 1
        del part.added


def test_the_parts_of_outputs_have_a_dict_of_attributes():
    assert vars(Logprob(-0.5, 1)) == {"logprob": -0.5, "rank": 1, "decoded_token": None}
    assert vars(RequestMetrics(5.0))["arrival_time"] == 5.0
    assert vars(WeightVersionSpan(0, 1, 2)) == {"version": 0, "start": 1, "end": 2}


@pytest.mark.parametrize(
    ("output", "name"),
    [(EmbeddingOutput(VECTOR), "embedding"), (ClassificationOutput(VECTOR), "probs")],
)
def test_vectors_have_the_fields_of_vllm(output, name):
    assert asdict(output) == {name: [0.5, -0.25]}
    assert output == type(output)([0.5, -0.25]) == type(output)(**{name: [0.5, -0.25]})
    assert replace(output, **{name: [1.0]}).array.dtype == np.float32
    assert output.array is VECTOR


def test_the_data_of_a_pooling_output_is_a_tensor():
    import torch

    output = PoolingOutput(data=torch.tensor([0.5, -0.25]))
    assert output == PoolingOutput(VECTOR)
    assert torch.equal(asdict(output)["data"], torch.from_numpy(VECTOR))
    with pytest.raises(TypeError, match="data"):
        PoolingOutput()
