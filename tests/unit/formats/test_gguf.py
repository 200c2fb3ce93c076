"""Headers of GGUF files, compared with those that the `gguf` package reads; and damaged files."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.damaged_gguf import Parts, Reader, Value, written
from support.gguf_models import KINDS, quantized, write

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import TENSOR_TYPES, is_gguf, read_header

TEXTS = ["", "a", "ünïcödé 漢字 🙂", "line\nbreak", "\x00"]


def fill(writer: gguf.GGUFWriter) -> None:
    """Adds a value of each type, arrays, and tensors of several types and dimensions."""
    writer.add_string("text", "é" * 300)
    writer.add_array("texts", TEXTS)
    writer.add_array("numbers", [3, -1, 2**31 - 1])
    writer.add_array("fractions", [0.5, -2.25])
    writer.add_array("flags", [True, False])
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(name, 7)
    writer.add_float32("float32", 0.1)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    values = np.linspace(-1, 1, 512, dtype=np.float32)
    for index, kind in enumerate(each.name for each in TENSOR_TYPES.values()):
        shape = [(512,), (2, 256), (1, 2, 256)][index % 3]
        writer.add_tensor(
            f"tensor.{kind}", quantized(values.reshape(shape), kind), raw_dtype=KINDS[kind]
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", "llama", fill)


def failure(path: Path) -> str:
    with pytest.raises(EngineStartError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_header_is_what_the_gguf_package_reads(file: Path) -> None:
    reader, header = gguf.GGUFReader(file), read_header(file)
    fields: dict[str, Any] = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata == fields
    assert header.architecture == "llama"
    assert [*header.tensors] == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(tensor.shape.tolist())[::-1]
        assert (entry.type_number, entry.begin) == (tensor.tensor_type, tensor.data_offset)
        assert entry.num_bytes == tensor.n_bytes


def test_the_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block_elements, kind.block_bytes)


def test_floats_are_read(file: Path) -> None:
    header = read_header(file)
    assert header.floats("tensor.F32") == np.linspace(-1, 1, 512, dtype=np.float32).tolist()
    with pytest.raises(EngineStartError, match=r"tensor\.F16 has type F16; expected F32"):
        header.floats("tensor.F16")


def test_a_file_that_ends_anywhere_is_damaged(file: Path) -> None:
    content = file.read_bytes()
    rng = random.Random(5)
    # Behind the last tensor lies padding.
    end = max(each.begin + each.num_bytes for each in read_header(file).tensors.values())
    for length in [4, 8, 23, 24, end - 1, *rng.sample(range(25, end), 60)]:
        file.write_bytes(content[:length])
        assert "damaged or incomplete" in failure(file)


def test_damaged_bytes_are_found_or_harmless(file: Path) -> None:
    content = file.read_bytes()
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(4, 2200)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        file.write_bytes(damaged)
        with suppress(EngineStartError):
            entries = read_header(file).tensors.values()
            assert all(entry.begin + entry.num_bytes <= len(content) for entry in entries)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert "cannot read" in failure(path)
    path.touch()
    assert "is empty" in failure(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "not a GGUF file" in failure(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in failure(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "GGUF version 1; shmllm reads" in failure(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQsIQ3s", 3, 0, 1, 1, b"k", 8, 99, b"abc"))
    assert "a text of 99 bytes at byte 45" in failure(path)


Change = Callable[[Parts], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "two values": (lambda p: p.values.append(p.values[1]), "two values of 'text'"),
    "two tensors": (lambda p: p.entries.append(p.entries[0]), r"two tensors tensor\.F32"),
    "overlap": (
        lambda p: p.entries.append(replace(p.entries[0], name=b"x")),
        r"tensor\.F32 and x overlap at byte [\d,]+",
    ),
    "a name of two lines": (
        lambda p: p.entries.append(replace(p.entries[0], name=b"x\ny")),
        r"the name of a tensor at byte [\d,]+: 'x\\ny'",
    ),
    "alignment": (
        lambda p: p.values.append(Value(b"general.alignment", 4, struct.pack("<I", 24))),
        "general.alignment is 24; expected a power of two",
    ),
    "outside": (
        lambda p: p.entries.append(replace(p.entries[0], name=b"x", offset=2**64 - 1)),
        "x would end at byte 18,446,744",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_file_may_not_have_is_named(name: str, file: Path) -> None:
    change, message = CHANGES[name]
    parts = Reader(file.read_bytes()).parts()
    change(parts)
    file.write_bytes(written(parts))
    assert re.search(message, failure(file))


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGMLQuantizationType.Q8_1
        writer.add_tensor("blk.0.x", np.zeros((1, 40), np.uint8), raw_dtype=kind)

    message = failure(write(tmp_path / "m.gguf", "llama", add))
    assert "blk.0.x has type Q8_1; supported: F32, F16, Q4_0" in message


def test_a_gguf_file_is_known_by_its_name_or_its_beginning(tmp_path: Path) -> None:
    names = {"a.gguf": b"text", "b.GGUF": b"", "c": b"GGUF...", "d": b"GGU", "e.bin": b""}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    assert [is_gguf(tmp_path / name) for name in names] == [True, True, True, False, False]
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "none.gguf")
