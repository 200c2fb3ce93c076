"""PoolingParams and PoolerConfig: ranges and defaults."""

from __future__ import annotations

import pytest

from shmllm.errors import RequestError
from shmllm.params.pooling import PoolerConfig, Pooling, PoolingParams, PoolingType


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 0}, "dimensions must be None or a whole number of at least 1, got 0"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"pooling_type": "CLS"}, "pooling_type must be None, LAST or MEAN, got 'CLS'"),
        ({"pooling_type": "mean"}, "pooling_type"),
        ({"task": "classify"}, "task must be None or embed, got 'classify'"),
        ({"use_activation": "yes"}, "use_activation must be None, True or False, got 'yes'"),
        ({"skip_reading_prefix_cache": 2}, "skip_reading_prefix_cache"),
    ],
)
def test_the_error_for_a_value_out_of_range_names_the_field(options, message):
    with pytest.raises(RequestError, match=message):
        PoolingParams(**options)
    config = {k: v for k, v in options.items() if k != "skip_reading_prefix_cache"}
    if config:
        with pytest.raises(RequestError, match=message.split(" ")[0]):
            PoolerConfig(**config)


def test_check_finds_an_invalid_value_that_was_assigned_later():
    params = PoolingParams()
    params.dimensions = -1
    with pytest.raises(RequestError):
        params.check()


def test_fields_that_are_none_get_the_values_of_the_pooler_config():
    config = PoolerConfig(seq_pooling_type="MEAN", use_activation=False, dimensions=8)
    left_open = config.complete(PoolingParams())
    assert (left_open.pooling_type, left_open.use_activation, left_open.dimensions) == (
        "MEAN",
        False,
        8,
    )
    own = config.complete(PoolingParams(use_activation=True, dimensions=4, pooling_type="LAST"))
    assert (own.pooling_type, own.use_activation, own.dimensions) == ("LAST", True, 4)


def test_the_default_is_the_normalized_state_of_the_last_token():
    params = PoolerConfig.make(None).complete(PoolingParams())
    assert (params.pooling_type, params.use_activation, params.dimensions) == ("LAST", True, None)


def test_a_pooler_config_may_be_a_dict():
    assert PoolerConfig.make({"pooling_type": "MEAN"}) == PoolerConfig(pooling_type="MEAN")
    with pytest.raises(TypeError, match="'pooling_typ'; the nearest option is 'pooling_type'"):
        PoolerConfig.make({"pooling_typ": "MEAN"})
    with pytest.raises(TypeError, match="PoolerConfig or a dict"):
        PoolerConfig.make("MEAN")
    with pytest.raises(RequestError, match="contradict"):
        PoolerConfig(pooling_type="MEAN", seq_pooling_type="LAST")


def test_mean_pooling_never_reads_the_prefix_cache():
    assert Pooling(PoolingType.LAST).reads_prefix_cache
    assert not Pooling(PoolingType.MEAN, reads_prefix_cache=True).reads_prefix_cache


def test_a_clone_is_another_object():
    params = PoolingParams(dimensions=3)
    clone = params.clone()
    clone.dimensions = 4
    assert params.dimensions == 3
