"""PoolingParams, and what `verify` makes of them for a model; Pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from shmllm.errors import RequestError
from shmllm.params.late_pooling import LateChunkingParams, LateInteractionParams
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.pooling import Pooling, PoolingParams, PoolingType
from shmllm.params.sampling import RequestOutputKind

EMBEDDING = {"dimensions", "use_activation"}
CLASSES = {"use_activation"}
STEPS = {"step_tag_id", "returned_token_ids"}
VALUES: dict[str, Any] = {
    "dimensions": 4,
    "use_activation": True,
    "step_tag_id": 1,
    "returned_token_ids": [0],
}


@dataclass
class Model:
    """What `verify` reads of a model."""

    pooler_config: PoolerConfig | None
    is_matryoshka: bool = True
    matryoshka_dimensions: list[int] | None = None
    served_model_name: str = "a-model"
    embedding_size: int = 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 0}, "dimensions must be None or a whole number of at least 1, got 0"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        (
            {"pooling_type": "MAX"},
            "pooling_type must be None or one of CLS, LAST, MEAN, ALL, STEP, got 'MAX'",
        ),
        ({"pooling_type": "mean"}, "pooling_type"),
        ({"task": "rank"}, "task must be None or one of embed, .*, got 'rank'"),
        ({"task": "score"}, "`score` task was removed; use `classify` instead."),
        ({"task": "encode"}, "`encode` task was removed; use `token_embed` or"),
        ({"use_activation": "yes"}, "use_activation must be None or True or False, got 'yes'"),
        ({"use_activation": 1}, "use_activation"),
        ({"skip_reading_prefix_cache": 2}, "skip_reading_prefix_cache"),
        ({"requires_token_ids": "no"}, "requires_token_ids"),
        ({"step_tag_id": -1}, "step_tag_id must be None or a token id, got -1"),
        ({"returned_token_ids": 3}, "returned_token_ids must be None or a list of whole numbers"),
        ({"returned_token_ids": ["3"]}, "returned_token_ids"),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind has to be FINAL_ONLY"),
        ({"extra_kwargs": [1]}, "extra_kwargs must be None or a dict"),
        ({"late_chunking_params": 3}, "must be None or a LateChunkingParams, got 3"),
        ({"late_interaction_params": "q"}, "must be None or a LateInteractionParams, got 'q'"),
    ],
)
def test_the_error_for_a_value_out_of_range_names_the_field(options, message):
    with pytest.raises(RequestError, match=message):
        PoolingParams(**options)


def test_check_finds_an_invalid_value_that_was_assigned_later():
    params = PoolingParams(late_chunking_params=LateChunkingParams(2))
    params.late_chunking_params.chunk_size = 0
    with pytest.raises(RequestError, match="positive integer"):
        params.check()
    params = PoolingParams()
    params.dimensions = -1
    with pytest.raises(RequestError):
        params.check()


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "2"])
def test_a_chunk_size_is_a_positive_integer(value):
    with pytest.raises(RequestError, match="positive integer"):
        LateChunkingParams(chunk_size=value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("cache", "q"), "Unsupported late-interaction mode: 'cache'"),
        (("cache_query", ""), "query_key must be a str that is not empty"),
        (("score_doc", None), "query_key"),
        (("cache_query", "q", "many"), "uses must be an integer"),
    ],
)
def test_fields_of_late_interaction_have_ranges(args, message):
    with pytest.raises(RequestError, match=message):
        LateInteractionParams(*args)


@pytest.mark.parametrize(
    ("task", "pooling_type", "allowed"),
    [
        ("embed", "CLS", EMBEDDING),
        ("classify", "CLS", CLASSES),
        ("token_embed", "ALL", EMBEDDING),
        ("token_embed", "STEP", EMBEDDING | STEPS),
        ("token_classify", "ALL", CLASSES),
        ("token_classify", "STEP", CLASSES | STEPS),
    ],
)
def test_each_task_has_its_parameters(task, pooling_type, allowed):
    model = Model(PoolerConfig(pooling_type=pooling_type))
    for name, value in VALUES.items():
        params = PoolingParams(task=task, **{name: value})
        if name in allowed:
            params.verify(model)
            continue
        with pytest.raises(RequestError, match=rf"only supports .* does not support \['{name}'\]"):
            params.verify(model)


def test_verify_fills_in_the_defaults():
    config = PoolerConfig(use_activation=False, dimensions=8)
    params = PoolingParams(task="embed")
    params.verify(Model(config))
    assert (params.use_activation, params.dimensions) == (False, 8)
    assert params.skip_reading_prefix_cache is False
    own = PoolingParams(task="embed", use_activation=True, dimensions=4)
    own.verify(Model(config))
    assert (own.use_activation, own.dimensions) == (True, 4)
    tokens = PoolingParams(task="token_classify")
    tokens.verify(Model(PoolerConfig(pooling_type="STEP", step_tag_id=5, returned_token_ids=[1])))
    assert (tokens.step_tag_id, tokens.returned_token_ids) == (5, [1])
    assert (tokens.use_activation, tokens.skip_reading_prefix_cache) == (True, True)
    plugin = PoolingParams(task="plugin")
    plugin.verify(Model(None))
    assert plugin.skip_reading_prefix_cache is True


@pytest.mark.parametrize(
    ("changes", "dimensions", "message"),
    [
        ({"is_matryoshka": False}, 8, "does not support Matryoshka.*received dimensions=8"),
        ({}, 33, r"only supports dimensions in range \[1, 32\], got 33"),
        ({"matryoshka_dimensions": [8, 16]}, 12, r"Matryoshka dimensions \[8, 16\], got 12"),
        ({}, 16, None),
        ({"matryoshka_dimensions": [8, 16]}, 16, None),
    ],
)
def test_dimensions_are_those_of_the_model(changes, dimensions, message):
    params = PoolingParams(task="embed", dimensions=dimensions)
    model = Model(PoolerConfig(), **changes)
    if message is None:
        params.verify(model)
        return
    with pytest.raises(RequestError, match=message):
        params.verify(model)


@pytest.mark.parametrize("task", ["embed", "classify", "token_classify", "plugin", None])
@pytest.mark.parametrize(
    "late",
    [
        {"late_chunking_params": LateChunkingParams(2)},
        {"late_interaction_params": LateInteractionParams("score_doc", "q")},
    ],
)
def test_late_parameters_are_for_token_embeddings(task, late):
    with pytest.raises(RequestError, match="requires token_embed"):
        PoolingParams(task=task, **late).verify(Model(PoolerConfig()))


def test_late_chunking_goes_without_other_selections():
    for name in ("dimensions", *STEPS):
        params = PoolingParams(
            task="token_embed",
            late_chunking_params=LateChunkingParams(2),
            **{name: VALUES[name]},
        )
        with pytest.raises(RequestError, match=f"does not support {name}"):
            params.verify(Model(PoolerConfig(pooling_type="STEP")))


def test_mean_pooling_never_reads_the_prefix_cache():
    assert Pooling(PoolingType.LAST).reads_prefix_cache
    assert not Pooling(PoolingType.MEAN, reads_prefix_cache=True).reads_prefix_cache


def test_a_clone_is_deep():
    params = PoolingParams(dimensions=3, late_chunking_params=LateChunkingParams(3))
    clone = params.clone()
    clone.dimensions = 4
    clone.late_chunking_params.chunk_size = 7
    assert params == PoolingParams(dimensions=3, late_chunking_params=LateChunkingParams(3))
