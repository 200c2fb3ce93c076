"""Parameters of requests whose token embeddings are used at once: late interaction, late chunking.

The classes have vLLM's names and fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.errors import RequestError

CACHE_QUERY, SCORE_DOC = "cache_query", "score_doc"


@dataclass(slots=True)
class LateInteractionParams:
    """How a request takes part in late interaction: the MaxSim score of a document for a query
    whose token embeddings are kept meanwhile.

    Args:
        mode: "cache_query": keep the token embeddings of this prompt, the query. "score_doc":
            the result is the score of this prompt, a document, for a query that is kept.
        query_key: the name under which the query is kept.
        query_uses: how many documents will be scored; the query is dropped behind the last one.
            None means 1.

    Raises:
        RequestError: a field is out of its range.
    """

    mode: str
    query_key: str
    query_uses: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (CACHE_QUERY, SCORE_DOC):
            raise RequestError(
                f"Unsupported late-interaction mode: {self.mode!r}; the modes are "
                f"{CACHE_QUERY!r} and {SCORE_DOC!r}",
                parameter="mode",
                value=self.mode,
            )
        if not isinstance(self.query_key, str) or not self.query_key:
            raise RequestError(
                f"query_key must be a str that is not empty, got {self.query_key!r}",
                parameter="query_key",
                value=self.query_key,
            )
        uses = self.query_uses
        if uses is not None and type(uses) is not int:
            raise RequestError(
                f"late-interaction query uses must be an integer value, got {uses!r}",
                parameter="query_uses",
                value=uses,
            )


@dataclass(slots=True)
class LateChunkingParams:
    """How a text is divided behind the model: a vector for each chunk, the mean of the embeddings
    of its tokens, which attended to the whole text.

    Args:
        chunk_size: the number of tokens of a chunk, special tokens included. The last chunk may
            have fewer.

    Raises:
        RequestError: it is no positive integer.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        if type(self.chunk_size) is not int or self.chunk_size < 1:
            raise RequestError(
                f"chunk_size must be a positive integer, got {self.chunk_size!r}",
                parameter="chunk_size",
                value=self.chunk_size,
            )
