"""Late interaction: the MaxSim score of a document for a query, of the embeddings of their tokens.

`LLM.score` computes it at once. Requests with LateInteractionParams compute it in two parts: one
keeps the token embeddings of a query, and others are scored for it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm.errors import RequestError
from shmllm.params.late_pooling import CACHE_QUERY, LateInteractionParams

Rows = npt.NDArray[np.float32]


def max_sim(query: Rows, document: Rows) -> float:
    """The sum, over the tokens of a query, of the largest product with a token of a document.

    Args:
        query: [query tokens, width], float32.
        document: [document tokens, width], float32; at least one token.
    """
    return float(np.add.reduce((query @ document.T).max(axis=1), dtype=np.float64))


class KeptQueries:
    """The token embeddings of queries by their keys, until the last of their documents is scored.

    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._queries: dict[str, tuple[Rows, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._queries)

    def result(self, params: LateInteractionParams, rows: Rows) -> Any:
        """The result of a request with these parameters: a float32 array without axes, which is 0
        for a query and the score for a document.

        Args:
            params: the request's.
            rows: the token embeddings of its prompt, [tokens, width].

        Raises:
            RequestError: the query of a document is not kept.
        """
        score = 0.0
        if params.mode == CACHE_QUERY:
            self._keep(params, rows)
        else:
            score = max_sim(self._query_of(params), rows)
            self.release(params)
        array = np.array(score, np.float32)
        array.flags.writeable = False
        return array

    def release(self, params: LateInteractionParams) -> None:
        """Count a document of a query as scored, or as failed; a query that is not kept, and the
        parameters of a query itself, change nothing."""
        key = params.query_key
        with self._lock:
            if params.mode == CACHE_QUERY or key not in self._queries:
                return
            rows, uses = self._queries.pop(key)
            if uses > 1:
                self._queries[key] = rows, uses - 1

    def _keep(self, params: LateInteractionParams, rows: Rows) -> None:
        with self._lock:
            self._queries[params.query_key] = rows, max(params.query_uses or 1, 1)

    def _query_of(self, params: LateInteractionParams) -> Rows:
        with self._lock:
            found = self._queries.get(params.query_key)
        if found is None:
            raise RequestError(
                f"late-interaction query cache miss for key {params.query_key!r}. Ensure query "
                "requests are executed before their paired document requests, and that query_uses "
                "is the number of documents."
            )
        return found[0]
