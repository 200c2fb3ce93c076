"""PoolerConfig: ranges, and what its pooling types mean."""

from __future__ import annotations

import pytest

from shmllm.errors import RequestError
from shmllm.params.pooler_config import PoolerConfig


def test_a_pooler_config_may_be_a_dict():
    assert PoolerConfig.make({"pooling_type": "MEAN"}) == PoolerConfig(pooling_type="MEAN")
    assert PoolerConfig.make(None) == PoolerConfig()
    with pytest.raises(TypeError, match="'pooling_typ'; the nearest option is 'pooling_type'"):
        PoolerConfig.make({"pooling_typ": "MEAN"})
    with pytest.raises(TypeError, match="PoolerConfig or a dict"):
        PoolerConfig.make("MEAN")


@pytest.mark.parametrize(
    ("kind", "seq", "tok"),
    [
        ("CLS", "CLS", None),
        ("LAST", "LAST", None),
        ("MEAN", "MEAN", None),
        ("ALL", None, "ALL"),
        ("STEP", None, "STEP"),
        (None, None, None),
    ],
)
def test_the_pooling_type_is_one_of_prompts_or_of_tokens(kind, seq, tok):
    config = PoolerConfig(pooling_type=kind)
    assert (config.seq_pooling_type, config.tok_pooling_type) == (seq, tok)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": False}, "Parameter `normalize` was removed; use `use_activation` instead."),
        ({"task": "score"}, "`score` task was removed; use `classify` instead."),
        ({"task": "rank"}, "task must be None or one of"),
        ({"pooling_type": "MAX"}, "pooling_type must be None or one of CLS, .*got 'MAX'"),
        ({"seq_pooling_type": "ALL"}, "seq_pooling_type must be None or one of CLS, LAST, MEAN"),
        ({"tok_pooling_type": "MEAN"}, "tok_pooling_type must be None or one of ALL, STEP"),
        (
            {"pooling_type": "MEAN", "seq_pooling_type": "LAST"},
            "Cannot set both `pooling_type` and `seq_pooling_type`",
        ),
        (
            {"pooling_type": "ALL", "tok_pooling_type": "ALL"},
            "Cannot set both `pooling_type` and `tok_pooling_type`",
        ),
        ({"logit_sigma": 0}, "logit_sigma cannot be 0"),
        ({"logit_mean": float("nan")}, "logit_mean must be None or a finite number"),
        ({"max_embed_len": 0}, "max_embed_len"),
        ({"enable_chunked_processing": "yes"}, "enable_chunked_processing"),
    ],
)
def test_wrong_values_are_refused_by_name(options, message):
    for make in (PoolerConfig.make, lambda given: PoolerConfig(**given)):
        with pytest.raises(RequestError, match=message):
            make(options)
