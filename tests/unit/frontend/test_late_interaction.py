"""Late interaction: MaxSim, and queries that are kept for documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.errors import RequestError
from shmllm.frontend.pooling.late_interaction import KeptQueries, max_sim
from shmllm.params.late_pooling import LateInteractionParams

RANDOM = np.random.default_rng(5)


def rows(count: int) -> np.ndarray:
    return RANDOM.standard_normal((count, 16)).astype(np.float32)


def test_max_sim_is_the_sum_of_the_largest_products():
    query, document = rows(5), rows(9)
    products = torch.from_numpy(query) @ torch.from_numpy(document).T
    assert max_sim(query, document) == pytest.approx(float(products.amax(-1).sum()), rel=1e-6)


def test_a_query_is_kept_for_as_many_documents_as_it_says():
    kept, query, documents = KeptQueries(), rows(3), [rows(4), rows(8)]
    assert kept.result(LateInteractionParams("cache_query", "q", 2), query).tolist() == 0
    score = LateInteractionParams("score_doc", "q")
    for document in documents:
        result = kept.result(score, document)
        assert (result.shape, result.dtype) == ((), np.float32)
        assert float(result) == np.float32(max_sim(query, document))
    assert len(kept) == 0
    with pytest.raises(RequestError, match="query cache miss for key 'q'"):
        kept.result(score, rows(2))


def test_a_document_that_failed_counts():
    kept = KeptQueries()
    kept.result(LateInteractionParams("cache_query", "q"), rows(3))
    kept.release(LateInteractionParams("cache_query", "q"))
    assert len(kept) == 1
    kept.release(LateInteractionParams("score_doc", "other"))
    kept.release(LateInteractionParams("score_doc", "q"))
    assert len(kept) == 0


def test_a_key_keeps_its_last_query():
    kept, second = KeptQueries(), rows(2)
    for query in (rows(3), second):
        kept.result(LateInteractionParams("cache_query", "q"), query)
    document = rows(4)
    result = kept.result(LateInteractionParams("score_doc", "q"), document)
    assert float(result) == np.float32(max_sim(second, document))
