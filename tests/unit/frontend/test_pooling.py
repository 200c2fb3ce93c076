"""The outputs of pooling requests: one that the engine aborted has no numbers, and says why."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from shmllm.frontend.pooling import as_embedding, pooling_output, similarity


def output(*numbers, error=None):
    request = SimpleNamespace(prompt_token_ids=[1, 2], prompt="a text")
    return pooling_output(
        SimpleNamespace(
            parent=SimpleNamespace(request_id="0"),
            vector=np.array(numbers, np.float32).tobytes(),
            request=request,
            num_cached_tokens=0,
            error=error,
        )
    )


def test_an_aborted_request_is_no_similarity_of_0():
    good, aborted = output(3.0, 4.0), output()
    assert (good.is_aborted, good.error) == (False, None)
    assert similarity(good, output(4.0, -3.0)).outputs.score == pytest.approx(0)
    for found in (aborted, as_embedding(aborted), similarity(good, aborted)):
        assert found.is_aborted
        assert "aborted the request" in found.error


def test_a_failed_request_keeps_its_error():
    failed = as_embedding(output(error="refused"))
    assert (failed.is_aborted, failed.error) == (False, "refused")
