"""POOL and EMBEDDINGS: a request to pool a prompt's hidden states, and pieces of the results.

POOL        POOL_HEADER | prompt ids i32[], salt
EMBEDDINGS  rows u32 | numbers i64[], offsets i64[], components u32[], all pieces f32[]
"""

from __future__ import annotations

from array import array
from struct import Struct

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs.columns import Embeddings, Piece
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.sections import Parts, Sections, column

# number, priority, type, flags, dimensions, second segment, skipped, prompt tokens, salt bytes
POOL_HEADER = Struct("<qiIIIIIII")
ROWS = Struct("<I")

NORMALIZE = 1
READ_PREFIX_CACHE = 2
USE_HEAD = 4
FLOAT_BYTES = 4


def encode_pool(request: EngineCoreRequest) -> Parts:
    pooling, salt = request.params, request.cache_salt.encode()
    assert isinstance(pooling, Pooling)
    header = POOL_HEADER.pack(
        request.number,
        request.priority,
        pooling.type,
        (NORMALIZE if pooling.normalize else 0)
        | (READ_PREFIX_CACHE if pooling.reads_prefix_cache else 0)
        | (USE_HEAD if pooling.uses_head else 0),
        pooling.dimensions,
        pooling.second_segment,
        pooling.num_skipped,
        len(request.prompt_token_ids),
        len(salt),
    )
    return (header, column("i", request.prompt_token_ids), salt)


def decode_pool(record: memoryview) -> EngineCoreRequest:
    header = POOL_HEADER.unpack_from(record)
    number, priority, kind, flags, dimensions, second, skipped, num_tokens, salt_bytes = header
    sections = Sections(record, POOL_HEADER.size)
    prompt = array("i", sections.take_bytes(4 * num_tokens))
    salt = sections.text(salt_bytes)
    sections.end()
    pooling = Pooling(
        PoolingType(kind),
        dimensions,
        normalize=bool(flags & NORMALIZE),
        reads_prefix_cache=bool(flags & READ_PREFIX_CACHE),
        uses_head=bool(flags & USE_HEAD),
        second_segment=second,
        num_skipped=skipped,
    )
    return EngineCoreRequest(number, prompt, pooling, salt, priority)


def encode_embeddings(message: Embeddings) -> Parts:
    return (
        ROWS.pack(len(message.numbers)),
        column("q", message.numbers),
        column("q", [piece.offset for piece in message.pieces]),
        column("I", [len(piece.data) // FLOAT_BYTES for piece in message.pieces]),
        *(piece.data for piece in message.pieces),
    )


def decode_embeddings(record: memoryview) -> Embeddings:
    (rows,) = ROWS.unpack_from(record)
    sections = Sections(record, ROWS.size)
    numbers, offsets = sections.take("q", rows), sections.take("q", rows)
    sizes = sections.take("I", rows)
    if len(numbers) != rows:
        raise ProtocolMismatchError("EMBEDDINGS has fewer rows than its header says")
    pieces = [
        Piece(offset, sections.take_bytes(FLOAT_BYTES * size))
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    sections.end()
    return Embeddings(numbers, pieces)
