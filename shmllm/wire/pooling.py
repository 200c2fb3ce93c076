"""POOL and EMBEDDINGS: a request for a vector of a prompt, and the vectors.

POOL        POOL_HEADER | prompt ids i32[], salt
EMBEDDINGS  rows u32 | numbers i64[], components u32[], all vectors f32[]
"""

from __future__ import annotations

from array import array
from struct import Struct

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs.columns import Embeddings
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.sections import Parts, Sections, column

# number, priority, type, flags, dimensions, prompt tokens, salt bytes
POOL_HEADER = Struct("<qiIIIII")
ROWS = Struct("<I")

NORMALIZE = 1
READ_PREFIX_CACHE = 2
FLOAT_BYTES = 4


def encode_pool(request: EngineCoreRequest) -> Parts:
    pooling, salt = request.params, request.cache_salt.encode()
    assert isinstance(pooling, Pooling)
    header = POOL_HEADER.pack(
        request.number,
        request.priority,
        pooling.type,
        (NORMALIZE if pooling.normalize else 0)
        | (READ_PREFIX_CACHE if pooling.reads_prefix_cache else 0),
        pooling.dimensions,
        len(request.prompt_token_ids),
        len(salt),
    )
    return (header, column("i", request.prompt_token_ids), salt)


def decode_pool(record: memoryview) -> EngineCoreRequest:
    number, priority, kind, flags, dimensions, num_tokens, salt_bytes = POOL_HEADER.unpack_from(
        record
    )
    sections = Sections(record, POOL_HEADER.size)
    prompt = array("i", sections.take_bytes(4 * num_tokens))
    salt = sections.text(salt_bytes)
    sections.end()
    pooling = Pooling(
        PoolingType(kind), dimensions, bool(flags & NORMALIZE), bool(flags & READ_PREFIX_CACHE)
    )
    return EngineCoreRequest(number, prompt, pooling, salt, priority)


def encode_embeddings(message: Embeddings) -> Parts:
    sizes = [len(vector) // FLOAT_BYTES for vector in message.vectors]
    return (
        ROWS.pack(len(message.numbers)),
        column("q", message.numbers),
        column("I", sizes),
        *message.vectors,
    )


def decode_embeddings(record: memoryview) -> Embeddings:
    (rows,) = ROWS.unpack_from(record)
    sections = Sections(record, ROWS.size)
    numbers, sizes = sections.take("q", rows), sections.take("I", rows)
    if len(numbers) != rows:
        raise ProtocolMismatchError("EMBEDDINGS has fewer rows than its header says")
    vectors = [sections.take_bytes(FLOAT_BYTES * size) for size in sizes]
    sections.end()
    return Embeddings(numbers, vectors)
