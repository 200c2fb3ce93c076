"""Damages GGUF files: single bytes and numbers, or values and tensors as a whole.

Each function takes a generator of random numbers and the content of a file, and returns another
content. The headers are read and written here by own code, which may write anything.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

EXTREMES = (0, 1, 2, 3, 31, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 5e-324, 1e-30, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    b"",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"{",
    b"{}{x}",
    b"a\nb",
    b"\0",
    b"gpt2",
    b"llama",
    b"mamba",
)
STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TENSOR_KINDS = (0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 24, 30, 39, 99)
ALIGNMENT = 32


@dataclass(frozen=True)
class Value:
    """A key with its value, as it is stored."""

    key: bytes
    kind: int
    payload: bytes


@dataclass(frozen=True)
class Entry:
    """A tensor; its dimensions are in the order of the file."""

    name: bytes
    dimensions: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Parts:
    """The parts of a valid file.

    Attributes:
        spots: the positions and widths of numbers, by what they mean.
        texts: the beginnings and ends of all texts.
    """

    values: list[Value]
    entries: list[Entry]
    data: bytes
    spots: dict[str, list[tuple[int, int]]]
    texts: list[tuple[int, int]]
    header_size: int


class Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 4
        self.spots: dict[str, list[tuple[int, int]]] = {}
        self.texts: list[tuple[int, int]] = []

    def number(self, width: int, meaning: str) -> int:
        begin = self.position
        self.spots.setdefault(meaning, []).append((begin, width))
        self.position += width
        return int.from_bytes(self.content[begin : self.position], "little")

    def text(self, meaning: str) -> bytes:
        length = self.number(8, meaning)
        begin = self.position
        self.position += length
        self.texts.append((begin, self.position))
        return self.content[begin : self.position]

    def value(self, kind: int, meaning: str) -> None:
        if kind == STRING:
            self.text(f"{meaning} length")
        elif kind == ARRAY:
            kind, count = self.number(4, "array kind"), self.number(8, "array count")
            for _ in range(count):
                self.value(kind, "element")
        else:
            self.number(WIDTHS[kind], meaning)

    def parts(self) -> Parts:
        self.number(4, "version")
        num_entries, num_values = self.number(8, "count"), self.number(8, "count")
        values, entries = [], []
        for _ in range(num_values):
            key, kind = self.text("key length"), self.number(4, "kind")
            begin = self.position
            self.value(kind, "value")
            values.append(Value(key, kind, self.content[begin : self.position]))
        for _ in range(num_entries):
            name, count = self.text("name length"), self.number(4, "dimensions")
            dimensions = tuple(self.number(8, "dimension") for _ in range(count))
            kind, offset = self.number(4, "tensor kind"), self.number(8, "offset")
            entries.append(Entry(name, dimensions, kind, offset))
        size = self.position
        data = self.content[-(-size // ALIGNMENT) * ALIGNMENT :]
        return Parts(values, entries, data, self.spots, self.texts, size)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def written(parts: Parts) -> bytes:
    """A file of changed parts."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(parts.entries), len(parts.values))
    for value in parts.values:
        head += text(value.key) + struct.pack("<I", value.kind) + value.payload
    for entry in parts.entries:
        count = len(entry.dimensions)
        head += text(entry.name) + struct.pack(f"<I{count}Q", count, *entry.dimensions)
        head += struct.pack("<IQ", entry.kind, entry.offset)
    return head + bytes(-len(head) % ALIGNMENT) + parts.data


def any_value(rng: random.Random, key: bytes) -> Value:
    """A key with a value of any type."""
    kind = rng.choice([0, 4, 5, 6, 7, STRING, ARRAY, ARRAY, 10, 11, 12])
    if kind == STRING:
        return Value(key, kind, text(rng.choice(TEXTS)))
    if kind != ARRAY:
        return Value(key, kind, any_number(rng, kind))
    element = rng.choice([0, 4, 5, 6, 7, STRING, ARRAY, 10, 12])
    count = rng.choice([0, 1, 2, 97, 20_000])
    if element == STRING:
        payload = b"".join(text(rng.choice(TEXTS)) for _ in range(min(count, 97)))
        count = min(count, 97)
    elif element == ARRAY:
        payload = (struct.pack("<IQ", ARRAY, 1)) * count
    else:
        payload = any_number(rng, element) * count
    if rng.random() < 0.3:
        count = rng.choice(EXTREMES)
    return Value(key, kind, struct.pack("<IQ", element, count) + payload)


def any_number(rng: random.Random, kind: int) -> bytes:
    if kind == 12:
        return struct.pack("<d", rng.choice([*FLOATS, 1e300, rng.uniform(-10, 10)]))
    if kind == 6:
        return struct.pack("<f", rng.choice([*FLOATS, rng.uniform(-10, 10)]))
    number: int = rng.choice([*EXTREMES, rng.randrange(200)]) % 256 ** WIDTHS[kind]
    return number.to_bytes(WIDTHS[kind], "little")


def change_values(rng: random.Random, content: bytes) -> bytes:
    """Values of other types, keys that are missing, there twice, or swapped."""
    parts = Reader(content).parts()
    values = parts.values
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(values))
        match rng.randrange(6):
            case 0:
                del values[place]
            case 1:
                values.append(values[place])
            case 2:
                other = rng.choice(values)
                values[place] = replace(other, key=values[place].key)
            case 3:
                alignment = rng.choice([0, 1, 7, 24, 64, 2**31, 2**32 - 1])
                values.append(Value(b"general.alignment", 4, struct.pack("<I", alignment)))
            case _:
                values[place] = any_value(rng, values[place].key)
    return written(parts)


KNOWN_KEYS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.attn_factor", "rope.scale_linear",
    "rope.freq_base", "rope.freq_base_swa", "attention.sliding_window", "expert_count",
    "attention.sliding_window_pattern", "attention.head_count_kv", "attention.key_length",
    "final_logit_softcapping", "attn_logit_softcapping", "block_count", "expert_used_count",
)  # fmt: skip
OTHER_KEYS = (
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.pre",
    "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template", "tokenizer.chat_template.x",
    "general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p",
    "general.sampling.min_p", "general.sampling.penalty_repeat", "general.architecture",
    "general.file_type", "split.count", "split.no", "split.tensors.count",
)  # fmt: skip


def set_known_value(rng: random.Random, content: bytes) -> bytes:
    """A key that is looked for, with any value."""
    parts = Reader(content).parts()
    named = [each for each in parts.values if each.key == b"general.architecture"]
    prefix = named[0].payload[8:].decode() if named else ""  # only the first piece has it
    names = [*(f"{prefix}.{name}" for name in KNOWN_KEYS), *OTHER_KEYS]
    for _ in range(rng.randint(1, 2)):
        key = rng.choice(names).encode()
        parts.values = [each for each in parts.values if each.key != key]
        kind = rng.choice([b"linear", b"yarn", b"none"])
        is_type = key.endswith(b"scaling.type") and rng.random() < 0.7
        made = Value(key, STRING, text(kind)) if is_type else any_value(rng, key)
        parts.values.append(made)
    return written(parts)


def change_entries(rng: random.Random, content: bytes) -> bytes:
    """Tensors that are missing, there twice, one over the other or elsewhere, of other types and
    shapes, or with other names."""
    parts = Reader(content).parts()
    entries = parts.entries
    for _ in range(min(rng.randint(1, 2), len(entries))):
        place = rng.randrange(len(entries))
        match rng.randrange(8):
            case 0:
                del entries[place]
            case 1:
                entries.append(entries[place])
            case _:
                entries[place] = changed_entry(rng, entries[place], rng.choice(entries), parts)
    return written(parts)


def changed_entry(rng: random.Random, entry: Entry, other: Entry, parts: Parts) -> Entry:
    dimensions = list(entry.dimensions)
    match rng.randrange(6):
        case 0:
            return replace(entry, offset=other.offset)
        case 1:
            offsets = [*EXTREMES, len(parts.data), entry.offset + 1]
            return replace(entry, offset=rng.choice(offsets))
        case 2:
            return replace(entry, kind=rng.choice(TENSOR_KINDS))
        case 3:
            for _ in range(min(rng.randint(1, 2), len(dimensions))):
                dimensions[rng.randrange(len(dimensions))] = rng.choice(EXTREMES)
            return replace(entry, dimensions=tuple(dimensions))
        case 4:
            shapes = [(), tuple(reversed(dimensions)), (*dimensions, 0), (0, *dimensions)]
            shapes += [(*dimensions, 1), (2**63, 0, 2**63), (2**32, 2**32, 2**32)]
            return replace(entry, dimensions=rng.choice(shapes))
    names = [other.name, b"blk.9.ffn_up_exps.weight", b"rope_freqs.weight", *TEXTS]
    return replace(entry, name=rng.choice([*names, *(entry.name + each for each in TEXTS)]))


def set_numbers(rng: random.Random, content: bytes) -> bytes:
    """Counts, lengths, types, positions and values become others, mostly extreme ones."""
    spots, damaged = Reader(content).parts().spots, bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        position, width = rng.choice(spots[rng.choice(sorted(spots))])
        present = int.from_bytes(content[position : position + width], "little")
        number = rng.choice([*EXTREMES, len(content), present + 1, present * 2, rng.randrange(99)])
        damaged[position : position + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(damaged)


def change_texts(rng: random.Random, content: bytes) -> bytes:
    """Texts that are no UTF-8, or have signs of programs in them."""
    texts, damaged = Reader(content).parts().texts, bytearray(content)
    for begin, end in rng.choices([each for each in texts if each[0] < each[1]], k=3):
        place = rng.randrange(begin, end)
        new = rng.choice([each for each in TEXTS if each])[: end - place]
        damaged[place : place + len(new)] = new
    return bytes(damaged)


def flip_bits(rng: random.Random, content: bytes) -> bytes:
    damaged, size = bytearray(content), Reader(content).parts().header_size
    for _ in range(rng.choice([1, 1, 2, 8])):
        damaged[rng.randrange(size)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def set_bytes(rng: random.Random, content: bytes) -> bytes:
    damaged, size = bytearray(content), Reader(content).parts().header_size
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(size)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
    return bytes(damaged)


def shift(rng: random.Random, content: bytes) -> bytes:
    """Bytes that are missing or too many."""
    place = rng.randrange(len(content))
    if rng.random() < 0.5:
        return content[:place] + content[place + rng.randint(1, 64) :]
    return content[:place] + rng.randbytes(rng.randint(1, 64)) + content[place:]


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    change_values, change_values, set_known_value, set_known_value, change_entries, change_entries,
    set_numbers, set_numbers, change_texts, flip_bits, set_bytes, shift, truncate,
)  # fmt: skip
