"""The messages between front end and engine, as plain dataclasses.

    front end -> engine    INIT   PROMPT_EMBEDS   ADD   POOL   ABORT   CALL   WORK
                           WEIGHTS   SHUTDOWN   IN_SLOT
    engine -> front end    HELLO  READY  FAILED  OUTPUTS  PROMPT_LOGPROBS  EMBEDDINGS
                           REJECTED  REPLY  TRACE  IN_SLOT
                           REJECTED  REPLY  WEIGHT_VERSION  IN_SLOT

    engine starts:  HELLO -> INIT -> READY | FAILED
    a request:      ADD -> OUTPUTS... (the last one carries its finish reason)
                    ADD -> PROMPT_LOGPROBS... -> OUTPUTS... if it asked for them
                    POOL -> EMBEDDINGS -> OUTPUTS with STOP and no token
                    PROMPT_EMBEDS, then its ADD or POOL, if the prompt is given as embeddings
                    ADD or POOL -> REJECTED
                    ABORT -> OUTPUTS with ABORT, unless the request had already ended
    new weights:    CALL START_WEIGHTS -> WEIGHTS... -> CALL FINISH_WEIGHTS; to every front
                    end WEIGHT_VERSION, behind the OUTPUTS of the weights before

IN_SLOT says where the record of another kind lies that is too large for the ring.

A request is known by its number: chosen by the front end, counting up, never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shmllm.outputs.columns import Embeddings, OutputColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.params.pooling import Pooling
from shmllm.params.sampling import SamplingParams, TokenSequences

PROTOCOL_VERSION = 3


class RecordKind(IntEnum):
    """Record kinds of both rings."""

    HELLO = 1
    INIT = 2
    READY = 3
    FAILED = 4
    ADD = 5
    ABORT = 6
    OUTPUTS = 7
    REJECTED = 8
    CALL = 9
    REPLY = 10
    IN_SLOT = 11
    SHUTDOWN = 12
    PROMPT_LOGPROBS = 13
    WORK = 20
    POOL = 21
    EMBEDDINGS = 22
    PROMPT_EMBEDS = 23
    TRACE = 24
    WEIGHTS = 30
    WEIGHT_VERSION = 31


class Method(IntEnum):
    """What a CALL can ask for."""

    RESET_PREFIX_CACHE = 1
    PAUSE = 2
    RESUME = 3
    TRACE = 4
    SLEEP = 5
    WAKE_UP = 6
    START_WEIGHTS = 10
    CHECK_WEIGHTS = 11
    FINISH_WEIGHTS = 12
    ABANDON_WEIGHTS = 13
    GET_WEIGHT_VERSION = 14


@dataclass(slots=True)
class Hello:
    """The engine process is up and waits for INIT."""

    protocol_version: int
    pid: int


@dataclass(slots=True)
class Text:
    """INIT (an EngineConfig) and READY (an EngineInfo): one JSON text."""

    json: str


@dataclass(slots=True)
class Failed:
    """The engine did not start. `traceback` is empty when the cause is the user's input."""

    message: str
    traceback: str


@dataclass(slots=True)
class AddRequest:
    """One request. Only the sampling fields that the engine acts on travel.

    Attributes:
        priority: lower goes first, where the scheduler looks at it.
        bad_words: the tokens of `params.bad_words`, which the front end knows.
        grammar: what the output has to match, as llguidance reads it; empty for none.
    """

    number: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    bad_words: TokenSequences = ()
    grammar: str = ""


@dataclass(slots=True)
class PoolRequest:
    """A prompt to make a vector of. `priority` as in AddRequest."""

    number: int
    prompt_token_ids: Sequence[int]
    pooling: Pooling
    cache_salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class PromptEmbeds:
    """Embeddings of a prompt, of shape [tokens, hidden]: the request of this number, which
    follows, has any token ids in their places. `ref` is an encoded `TensorRef`."""

    number: int
    ref: bytes


@dataclass(slots=True)
class Abort:
    """Requests to end at once."""

    numbers: list[int]


@dataclass(slots=True)
class Rejected:
    """The engine could not take a request; it ends with reason "error".

    Attributes:
        is_retryable: nothing is wrong with the request: the engine is paused.
    """

    number: int
    message: str
    is_retryable: bool = False


@dataclass(slots=True)
class Call:
    """A question to the engine, answered by the Reply of the same number. `json` is its
    argument, one JSON value."""

    number: int
    method: Method
    json: str = "null"


@dataclass(slots=True)
class Work:
    """Something for the engine's worker to do, answered by the Reply of the same number.
    `json` and the answer's are JSON objects: what `engine.worker_desk` makes of values and
    tensors."""

    number: int
    json: str


@dataclass(slots=True)
class Weights:
    """A bucket of new weights, which lies in a slot. `json` says which: what
    `engine.weight_bucket` makes of them."""

    slot: tuple[int, int, int]
    json: str


@dataclass(slots=True)
class WeightVersion:
    """From here on, outputs are of weights with this version."""

    version: int | str


@dataclass(slots=True)
class Shutdown:
    """Take no new requests, and end when those there are done or `drain_s` has passed."""

    drain_s: float


@dataclass(slots=True)
class Trace:
    """The engine records what happens, and asks its front end to do the same in this
    directory."""

    directory: str


@dataclass(slots=True)
class Reply:
    """The answer to a Call: a JSON value, or if not `ok` the JSON list [type of the exception,
    message, traceback]; a type of `errors.REFUSALS` where the engine refused what was asked."""

    number: int
    ok: bool
    json: str


Message = (
    Hello
    | Text
    | Failed
    | AddRequest
    | PoolRequest
    | PromptEmbeds
    | Embeddings
    | Abort
    | Rejected
    | Call
    | Reply
    | Shutdown
    | Trace
    | Work
    | Weights
    | WeightVersion
    | OutputColumns
    | PromptLogprobs
)
