"""From a front end's message to a request of the core, whichever kind it is.

Owns which part of a message goes where. The engine process and the engine in the caller's
own process share it.
"""

from __future__ import annotations

from typing import Any

from shmllm.engine.core import EngineCore
from shmllm.errors import EnginePausedError, RequestError
from shmllm.wire.messages import AddRequest, PoolRequest, Rejected


def admit(
    core: EngineCore, client: int, message: AddRequest | PoolRequest, embeds: Any = None
) -> Rejected | None:
    """Queue a request of the front end `client`.

    Args:
        embeds: a tensor that stands for the embeddings of the prompt's tokens.

    Returns:
        What to answer if it cannot be served; None if it is queued.
    """
    try:
        refusal = _admit(core, client, message, embeds)
    except EnginePausedError as pause:
        return Rejected(message.number, str(pause), is_retryable=True)
    except RequestError as problem:
        refusal = str(problem)
    except Exception as problem:  # one bad request must not end the others
        refusal = f"{type(problem).__name__}: {problem}"
    return None if refusal is None else Rejected(message.number, refusal)


def _admit(
    core: EngineCore, client: int, message: AddRequest | PoolRequest, embeds: Any
) -> str | None:
    if isinstance(message, PoolRequest):
        return core.pool(
            client,
            message.number,
            message.prompt_token_ids,
            message.pooling,
            message.cache_salt,
            priority=message.priority,
            embeds=embeds,
        )
    return core.add(
        client,
        message.number,
        message.prompt_token_ids,
        message.params,
        message.cache_salt,
        priority=message.priority,
        bad_words=message.bad_words,
        grammar=message.grammar,
        embeds=embeds,
    )
