"""The outputs of pooling requests: one that the engine aborted has no numbers, and says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmllm.frontend.pooling.late_interaction import KeptQueries
from shmllm.frontend.pooling.plan import PoolingPlan
from shmllm.frontend.pooling.requests import PoolingRequest, pooling_output
from shmllm.frontend.pooling.text_scores import cosine, scored
from shmllm.outputs.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shmllm.params.late_pooling import LateInteractionParams
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

KINDS: list[Any] = [EmbeddingRequestOutput, ClassificationRequestOutput, ScoringRequestOutput]


def output(
    *numbers: float,
    error: str | None = None,
    end: str = "stop",
    plan: PoolingPlan | None = None,
    interaction: LateInteractionParams | None = None,
    kept: KeptQueries | None = None,
) -> Any:
    request = PoolingRequest(
        prompt="a text",
        params=SamplingParams(),
        submitted=EngineCoreRequest(0, [1, 2], Pooling()),
        plan=plan or PoolingPlan(task="embed", width=2),
        interaction=interaction,
    )
    state: Any = SimpleNamespace(
        parent=SimpleNamespace(request_id="0"),
        pieces=SimpleNamespace(data=np.array(numbers, np.float32).tobytes()),
        request=request,
        num_cached_tokens=0,
        error=error,
        finish_reason=end,
    )
    return pooling_output(state, KeptQueries() if kept is None else kept)


def test_an_aborted_request_is_no_similarity_of_0() -> None:
    good, aborted = output(3.0, 4.0), output()
    assert (good.is_aborted, good.error) == (False, None)
    assert scored(good, output(4.0, -3.0), cosine).outputs.score == pytest.approx(0)
    for found in (
        aborted,
        EmbeddingRequestOutput.from_base(aborted),
        scored(good, aborted, cosine),
    ):
        assert found.is_aborted
        assert "aborted the request" in str(found.error)


def test_rows_of_an_aborted_request_are_no_result() -> None:
    found = output(1.0, 2.0, end="abort", plan=PoolingPlan(task="token_embed", width=2))
    assert (found.is_aborted, len(found.outputs.array)) == (True, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_request_keeps_its_error(kind: Any) -> None:
    failed = kind.from_base(output(error="refused"))
    assert (failed.is_aborted, failed.error) == (False, "refused")
    assert type(failed) is kind


def test_a_result_of_another_shape_is_refused() -> None:
    rows = PoolingOutput(np.ones((2, 2), np.float32))
    for kind in KINDS:
        whole = output(1.0, 2.0)
        whole.outputs = rows
        with pytest.raises(ValueError, match="pooled_data should be"):
            kind.from_base(whole)
    assert ScoringOutput.from_base(PoolingOutput(np.ones((1,), np.float32))).score == 1.0


def test_a_failed_document_leaves_its_query_to_the_others() -> None:
    kept, plan = KeptQueries(), PoolingPlan(task="token_embed", width=2)
    query = LateInteractionParams("cache_query", "q", 2)
    document = LateInteractionParams("score_doc", "q")
    assert output(1, 0, plan=plan, interaction=query, kept=kept).outputs.array == 0
    assert output(error="no", plan=plan, interaction=document, kept=kept).error == "no"
    found = output(0.5, 2, plan=plan, interaction=document, kept=kept)
    assert found.outputs.array == np.float32(0.5)
    missing = output(0.5, 2, plan=plan, interaction=document, kept=kept)
    assert "query cache miss" in missing.error
    assert len(missing.outputs.array) == 0
