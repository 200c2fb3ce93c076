"""The strings in a checkpoint of torch.save, names of tensors among them, and the sizes of its
tensors' memory, without unpickling it."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.formats.text_files import open_regular

_MOST_BYTES = 100_000_000
_ITEM_BYTES = {
    **dict.fromkeys(("UntypedStorage", "BoolStorage", "ByteStorage", "CharStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_PUSHES = {"GLOBAL", "BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1"}


class Storage(NamedTuple):
    """The memory of tensors: the member ``data/KEY`` of an archive.

    key: its key.
    num_bytes: its size.
    """

    key: str
    num_bytes: int


def pickled_strings(path: Path) -> frozenset[str]:
    """Returns the strings in the pickle of a file.

    Args:
        path: an archive, as torch.save has written them since torch 1.6.

    Returns:
        The strings; none if the file is missing, damaged or no such archive.
    """
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            _, content = read_pickle(archive)
        return frozenset(each for _, each, _ in pickletools.genops(content) if type(each) is str)
    except Exception:  # a damaged archive or pickle may cause any
        return frozenset()


def read_pickle(archive: zipfile.ZipFile) -> tuple[str, bytes]:
    """Returns the name of an archive's pickle, and the pickle.

    Raises:
        ValueError: there is none, or several, or it is too large.
    """
    members = [each for each in archive.infolist() if each.filename.endswith("data.pkl")]
    if len(members) != 1 or members[0].file_size > _MOST_BYTES:
        raise ValueError("it has no data.pkl, or several, or a large one")
    del members[0].CRC  # torch may write wrong ones (set_crc32_options), and checks none
    return members[0].filename, archive.read(members[0])


def pickled_storages(content: bytes) -> list[Storage]:
    """Returns the storages that a pickle of torch.save refers to.

    Raises:
        pickle.UnpicklingError: a reference is not written as torch.save does it.
    """
    found = []
    memo: dict[Any, Any] = {}
    top: Any = None
    items: list[Any] | None = None  # those since a mark, if nothing else was done
    for code, value, _ in pickletools.genops(content):
        name = code.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = top
        elif name in _PUSHES or name in ("BINGET", "LONG_BINGET"):
            top = value if name in _PUSHES else memo.get(value)
            if items is not None:
                items.append(top)
        elif name == "TUPLE":
            top, items = None if items is None else tuple(items), None
        elif name == "BINPERSID":
            found.append(_storage(top))
            top = items = None
        else:
            top, items = None, [] if name == "MARK" else None
    return found


def _storage(reference: Any) -> Storage:
    match reference:
        case ("storage", str(kind), str(key), str(), int(count)):
            size = _ITEM_BYTES.get(kind.replace(" ", ".").split(".")[-1])
            if size is not None:
                return Storage(key, count * size)
    raise pickle.UnpicklingError("a storage is not written as torch.save does it")
