"""PROMPT_ITEM: encodes and decodes an image of a prompt.

PROMPT_ITEM   HEADER | spans as (first, last) u32[], forgotten identities of 32 bytes each,
              tensor reference, or nothing if the engine has the pixels
"""

from __future__ import annotations

from struct import Struct

from shmllm.errors import ProtocolMismatchError
from shmllm.params.items import IDENTITY_BYTES, Item
from shmllm.wire.messages import PromptItem
from shmllm.wire.sections import Parts, Sections, column

# number, identity, grid, spans, forgotten identities, bytes of the tensor reference
HEADER = Struct(f"<q{IDENTITY_BYTES}sIIIIII")


def encode_prompt_item(message: PromptItem) -> Parts:
    item = message.item
    sizes = len(item.spans), len(message.forgotten), len(message.ref)
    header = HEADER.pack(message.number, item.identity, *item.grid, *sizes)
    spans = column("I", [place for span in item.spans for place in span])
    return (header, spans, *message.forgotten, message.ref)


def decode_prompt_item(record: memoryview) -> PromptItem:
    number, identity, *grid, num_spans, num_forgotten, ref_bytes = HEADER.unpack_from(record)
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
    item = Item(identity, spans, (grid[0], grid[1], grid[2]))
    return PromptItem(number, item, ref, forgotten)
