"""PooledModel: which task a request has, and what the engine and the front end do for it."""

from __future__ import annotations

from typing import Any

import pytest
from support.fakes import info

from shmllm.config.pooling import PoolingInfo
from shmllm.errors import RequestError
from shmllm.frontend.pooling.pooled_model import PooledModel
from shmllm.params.late_pooling import LateChunkingParams
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.pooling import Pooling, PoolingParams, PoolingType

CLASSIFIER: dict[str, Any] = {
    "tasks": ("classify", "token_classify"),
    "task": "classify",
    "pooling_type": "CLS",
    "head": "classifier",
    "activation": "softmax",
    "labels": ("no", "maybe", "yes"),
}


def model(config: PoolerConfig | None = None, **changes: Any) -> PooledModel:
    pooling = PoolingInfo(**{"embedding_size": 32, **changes})
    return PooledModel(info(pooling=pooling), config or PoolerConfig())


def test_an_embedding_has_the_models_defaults():
    engine, plan = model(pooling_type="MEAN", head="projection").resolve(PoolingParams(), None)
    assert engine == Pooling(PoolingType.MEAN, uses_head=True)
    assert (plan.task, plan.width) == ("embed", 32)
    engine, _ = model(normalize=False).resolve(PoolingParams(), "embed")
    assert engine == Pooling(PoolingType.LAST, normalize=False)


def test_the_pooler_config_has_precedence_over_the_model_and_the_params_over_both():
    own = model(PoolerConfig(pooling_type="CLS", use_activation=True), normalize=False)
    assert own.resolve(PoolingParams(), None)[0] == Pooling(PoolingType.CLS)
    params = PoolingParams(pooling_type="LAST", use_activation=False)
    assert own.resolve(params, None)[0] == Pooling(PoolingType.LAST, normalize=False)
    assert params == PoolingParams(pooling_type="LAST", use_activation=False)


def test_classes_are_logits_of_the_head_and_then_scores():
    config = PoolerConfig(logit_mean=1.0, logit_sigma=2.0)
    own = model(config, **CLASSIFIER, normalize=False)
    engine, plan = own.resolve(PoolingParams(), None)
    assert engine == Pooling(PoolingType.CLS, normalize=False, uses_head=True)
    assert (plan.task, plan.width, plan.activation) == ("classify", 3, "softmax")
    assert (plan.mean, plan.sigma) == (1.0, 2.0)
    _, plan = own.resolve(PoolingParams(use_activation=False), "token_classify")
    assert (plan.task, plan.activation) == ("token_classify", "none")


@pytest.mark.parametrize("option", ["enable_chunked_processing", "max_embed_len"])
def test_padded_texts_are_not_divided(option):
    own = model(
        PoolerConfig(**{option: True if option.startswith("enable") else 99}), text_length=64
    )
    with pytest.raises(RequestError, match="all texts of the model have 64 tokens, with padding"):
        own.resolve(PoolingParams(), None)


def test_a_softmax_of_one_label_is_a_sigmoid():
    own = model(**CLASSIFIER | {"labels": ("yes",)})
    assert own.resolve(PoolingParams(), None)[1].activation == "sigmoid"


def test_rows_of_tokens_do_not_read_the_prefix_cache_unless_told_to():
    engine, _ = model().resolve(PoolingParams(), "token_embed")
    assert engine == Pooling(PoolingType.ALL, reads_prefix_cache=False)
    engine, _ = model().resolve(PoolingParams(skip_reading_prefix_cache=False), "token_embed")
    assert engine.reads_prefix_cache


def test_late_chunking_normalises_behind_the_means():
    params = PoolingParams(
        late_chunking_params=LateChunkingParams(3), skip_reading_prefix_cache=False
    )
    engine, plan = model().resolve(params, "token_embed")
    assert engine == Pooling(PoolingType.ALL, normalize=False, reads_prefix_cache=False)
    assert plan.normalize
    with pytest.raises(RequestError, match="STEP"):
        model(PoolerConfig(pooling_type="STEP")).resolve(params, "token_embed")


def test_columns_of_steps_come_before_the_dimensions():
    config = PoolerConfig(pooling_type="STEP", step_tag_id=7, returned_token_ids=[3, 1])
    own = model(config, matryoshka=True)
    engine, plan = own.resolve(PoolingParams(dimensions=1), "token_embed")
    assert (engine.dimensions, engine.normalize) == (0, False)
    assert (plan.step_tag_id, plan.columns, plan.width) == (7, (3, 1), 32)
    assert (plan.dimensions, plan.normalize) == (1, True)
    with pytest.raises(RequestError, match=r"returned_token_ids has 40; .* from 0 to 31"):
        own.resolve(PoolingParams(returned_token_ids=[1, 40]), "token_embed")


@pytest.mark.parametrize(
    ("changes", "task", "params", "message"),
    [
        ({}, "score", {}, "`score` task was removed"),
        ({}, "rank", {}, "pooling_task must be None or one of"),
        ({}, "plugin", {}, "takes a prompt of"),
        ({}, "embed", {"task": "token_embed"}, "You cannot overwrite params.task='token_embed'"),
        ({}, "classify", {}, "Classification API is not supported.*'embed' and 'token_embed'.*"
         "convert='classify'"),
        (CLASSIFIER, "embed", {}, "Embedding API is not supported.*'classify' and .*"
         "convert='embed'"),
        ({"tasks": ()}, None, {}, "only supported for pooling models.*runner='generate'"),
        ({}, "embed", {"pooling_type": "ALL"}, "'ALL' is not possible for the task 'embed', which "
         "has the types CLS, LAST, MEAN"),
        ({}, "token_embed", {"pooling_type": "MEAN"}, "has the types ALL, STEP"),
        ({}, "embed", {"dimensions": 4}, "does not support Matryoshka"),
        ({}, "embed", {"step_tag_id": 4}, "does not support"),
        ({}, "embed", {"extra_kwargs": {"a": 1}}, r"extra_kwargs are for score; .*\['a'\]"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_one_error(changes, task, params, message):
    with pytest.raises(RequestError, match=message):
        model(**changes).resolve(PoolingParams(**params), task)


def test_the_task_is_the_calls_then_the_params_then_the_configs_then_the_models():
    own = model(PoolerConfig(task="token_embed"))
    assert own.task_for(None) == "token_embed"
    assert own.task_for(None, PoolingParams(task="embed")) == "embed"
    assert own.task_for("embed") == "embed"
    assert own.task_for(None, PoolingParams(task="plugin")) == "token_embed"
    assert model(task="token_embed").task_for(None) == "token_embed"
    with pytest.raises(RequestError, match="not supported"):
        model(PoolerConfig(task="classify")).task_for(None)
