"""PROMPT_ITEM: encodes and decodes an item of a prompt.

PROMPT_ITEM   HEADER | spans as (first, last) u32[], forgotten identities of 32 bytes each,
              tensor reference, or nothing if the engine has the data
"""

from __future__ import annotations

from math import inf
from struct import Struct

from shmllm.errors import ProtocolMismatchError
from shmllm.params.items import IDENTITY_BYTES, MODALITIES, Item
from shmllm.wire.messages import PromptItem
from shmllm.wire.sections import Parts, Sections, column

# number, identity, modality, whether the data are embeddings, seconds of a frame, grid, spans,
# forgotten identities, bytes of the tensor reference
HEADER = Struct(f"<q{IDENTITY_BYTES}sB?dIIIIII")


def encode_prompt_item(message: PromptItem) -> Parts:
    item = message.item
    sizes = len(item.spans), len(message.forgotten), len(message.ref)
    kind = MODALITIES.index(item.modality), item.is_embeds, item.frame_seconds
    header = HEADER.pack(message.number, item.identity, *kind, *item.grid, *sizes)
    spans = column("I", [place for span in item.spans for place in span])
    return (header, spans, *message.forgotten, message.ref)


def decode_prompt_item(record: memoryview) -> PromptItem:
    number, identity, kind, is_embeds, seconds, *grid, num_spans, num_forgotten, ref_bytes = (
        HEADER.unpack_from(record)
    )
    if kind >= len(MODALITIES) or not 0 <= seconds < inf:
        raise ProtocolMismatchError(f"PROMPT_ITEM of kind {kind} with frames of {seconds} seconds")
    sections = Sections(record, HEADER.size)
    places = sections.take("I", 2 * num_spans)
    spans = tuple(zip(places[::2], places[1::2], strict=True))
    before = 0
    for first, last in spans:
        if not before <= first < last:
            raise ProtocolMismatchError("the spans of PROMPT_ITEM are empty or out of order")
        before = last
    if not spans:
        raise ProtocolMismatchError("PROMPT_ITEM has no spans")
    forgotten = [sections.take_bytes(IDENTITY_BYTES) for _ in range(num_forgotten)]
    ref = sections.take_bytes(ref_bytes)
    sections.end()
    shape = grid[0], grid[1], grid[2]
    item = Item(identity, spans, shape, None, MODALITIES[kind], seconds, is_embeds)
    return PromptItem(number, item, ref, forgotten)
