"""POOL: encodes and decodes a request to pool a prompt's hidden states.

POOL_HEADER | prompt ids i32[], ids of the encoder's text i32[], salt, adapter
"""

from __future__ import annotations

from array import array
from struct import Struct

from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.adapter import decode_adapter, encode_adapter
from shmllm.wire.sections import Parts, Sections, column

# number, priority, type, flags, dimensions, second segment, skipped, prompt tokens, tokens of the
# encoder's text, salt bytes, adapter bytes
POOL_HEADER = Struct("<qiIIIIIIIII")

NORMALIZE = 1
READ_PREFIX_CACHE = 2
USE_HEAD = 4


def encode_pool(request: EngineCoreRequest) -> Parts:
    pooling, salt, lora = (
        request.params,
        request.cache_salt.encode(),
        encode_adapter(request.lora),
    )
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
        len(request.encoder_token_ids),
        len(salt),
        len(lora),
    )
    prompt, text = request.prompt_token_ids, request.encoder_token_ids
    return (header, column("i", prompt), column("i", text), salt, lora)


def decode_pool(record: memoryview) -> EngineCoreRequest:
    header = POOL_HEADER.unpack_from(record)
    number, priority, kind, flags, dimensions, second, skipped, *sizes = header
    num_tokens, num_encoder_tokens, salt_bytes, lora_bytes = sizes
    sections = Sections(record, POOL_HEADER.size)
    prompt = array("i", sections.take_bytes(4 * num_tokens))
    encoder_text = sections.take("i", num_encoder_tokens)
    salt = sections.text(salt_bytes)
    lora = decode_adapter(sections.text(lora_bytes), "POOL")
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
    return EngineCoreRequest(
        number,
        prompt,
        pooling,
        salt,
        priority,
        encoder_token_ids=encoder_text or (),
        lora=lora,
    )
