"""The messages between a front end and an engine, as plain dataclasses.

    front end -> engine    INIT   PROMPT_EMBEDS   PROMPT_ITEM   ADD   POOL   ABORT
                           CALL   WORK   WEIGHTS   IN_SLOT
    engine -> front end    HELLO  READY  FAILED  OUTPUTS  PROMPT_LOGPROBS  EMBEDDINGS
                           ROUTED_EXPERTS  SAMPLING_MASKS  REJECTED  REPLY  TRACE
                           WEIGHT_VERSION  IN_SLOT

    engine start:   HELLO -> INIT -> READY | FAILED
    a request:      ADD -> OUTPUTS... (the last one carries the finish reason)
                    ADD -> PROMPT_LOGPROBS... -> OUTPUTS... if it asked for them
                    ADD -> ROUTED_EXPERTS, SAMPLING_MASKS -> OUTPUTS... if the engine reports them
                    POOL -> EMBEDDINGS -> OUTPUTS with STOP and no token
                    PROMPT_EMBEDS -> its ADD or POOL, if the prompt is given as embeddings
                    PROMPT_ITEM... -> its ADD or POOL, for each image of the prompt
                    ADD or POOL -> REJECTED
                    ABORT -> OUTPUTS with ABORT, unless the request has already ended
    new weights:    CALL START_WEIGHTS -> WEIGHTS... -> CALL FINISH_WEIGHTS. Every front end then
                    gets WEIGHT_VERSION, after the last OUTPUTS of the old weights. On the engine's
                    GPU: CALL LEND_MEMORY once, and CALL STAGE_LENT in place of each WEIGHTS.
                    From a trainer's network or GPU: CALL OPEN_TRANSFER once, and in place of
                    WEIGHTS CALL RECEIVE_WEIGHTS; CALL TRANSFER_PROGRESS after each of the two,
                    until it returns 0

ADD and POOL carry an `EngineCoreRequest`. IN_SLOT says in which tensor slot a record lies that is
too large for the ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from shmllm.outputs.columns import Embeddings, MaskColumns, OutputColumns, RoutedColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest

PROTOCOL_VERSION = 14
SHUTTING_DOWN = "the engine is shutting down and takes no new requests"
"""The message of REJECTED from an engine that ends. A front end may try another engine."""


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
    PROMPT_LOGPROBS = 13
    WORK = 20
    POOL = 21
    EMBEDDINGS = 22
    PROMPT_EMBEDS = 23
    TRACE = 24
    PROMPT_ITEM = 25
    ROUTED_EXPERTS = 26
    SAMPLING_MASKS = 27
    WEIGHTS = 30
    WEIGHT_VERSION = 31


class Method(IntEnum):
    """The methods that a CALL can name."""

    RESET_PREFIX_CACHE = 1
    PAUSE = 2
    RESUME = 3
    TRACE = 4
    SLEEP = 5
    WAKE_UP = 6
    RESET_ENCODER_CACHE = 7
    START_WEIGHTS = 10
    CHECK_WEIGHTS = 11
    FINISH_WEIGHTS = 12
    ABANDON_WEIGHTS = 13
    GET_WEIGHT_VERSION = 14
    LEND_MEMORY = 15
    STAGE_LENT = 16
    SET_WEIGHT_VERSION = 17
    ADD_LORA = 20
    REMOVE_LORA = 21
    LIST_LORAS = 22
    PIN_LORA = 23
    HOLD_LORA = 24
    RELEASE_LORA = 25
    OPEN_TRANSFER = 30
    RECEIVE_WEIGHTS = 31
    TRANSFER_PROGRESS = 32
    CLOSE_TRANSFER = 33


@dataclass(slots=True)
class Hello:
    """The engine process has started and waits for INIT."""

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
class PromptEmbeds:
    """The (tokens, hidden) embeddings of a prompt. The request with this number follows.

    Attributes:
        ref: an encoded `TensorRef`.
    """

    number: int
    ref: bytes


@dataclass(slots=True)
class PromptItem:
    """An image of a prompt. The request with this number follows.

    Attributes:
        item: the item, without its data.
        ref: an encoded `TensorRef` of the data, see `params.items.Item`; empty: the
            engine has kept them since an earlier request of this front end.
        forgotten: identities of items that the engine need not keep any more.
    """

    number: int
    item: Item
    ref: bytes = b""
    forgotten: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Abort:
    """Requests that the engine has to end now."""

    numbers: list[int]


@dataclass(slots=True)
class Rejected:
    """The engine did not accept a request, or ended it with reason "error".

    Attributes:
        is_retryable: the request itself is valid; the engine is paused.
    """

    number: int
    message: str
    is_retryable: bool = False


@dataclass(slots=True)
class Call:
    """A method call to the engine. The Reply with the same number answers it.

    Attributes:
        json: the argument, one JSON value.
    """

    number: int
    method: Method
    json: str = "null"


@dataclass(slots=True)
class Work:
    """A remote procedure call to the engine's worker. The Reply with the same number answers it.

    Attributes:
        json: a JSON object that refers to the arguments' tensors; see `wire.rpc`. The reply has
            the same form.
    """

    number: int
    json: str


@dataclass(slots=True)
class Weights:
    """A bucket of new weights.

    Attributes:
        slot: the (slot, offset, bytes) in which the bucket lies.
        json: the list of the bucket's pieces; see `wire.weight_bucket`.
    """

    slot: tuple[int, int, int]
    json: str


@dataclass(slots=True)
class WeightVersion:
    """All later outputs are computed with the weights of this version."""

    version: int | str


@dataclass(slots=True)
class Trace:
    """The engine records a trace, and asks its front end to record in this directory too."""

    directory: str


@dataclass(slots=True)
class Reply:
    """The answer to a Call or to Work.

    Attributes:
        ok: the call succeeded.
        json: the result, one JSON value. If the call failed, the list [exception type, message,
            traceback]; the type is one of `errors.REFUSALS` if the engine refused the call.
    """

    number: int
    ok: bool
    json: str


Message = (
    Hello
    | Text
    | Failed
    | EngineCoreRequest
    | PromptEmbeds
    | PromptItem
    | Embeddings
    | RoutedColumns
    | MaskColumns
    | Abort
    | Rejected
    | Call
    | Reply
    | Trace
    | Work
    | Weights
    | WeightVersion
    | OutputColumns
    | PromptLogprobs
)
