"""The strings in a checkpoint of torch.save, names of tensors among them, without unpickling it."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

from shmllm.formats.text_files import open_regular

_MOST_BYTES = 100_000_000


def pickled_strings(path: Path) -> frozenset[str]:
    """Returns the strings in the pickle of a file.

    Args:
        path: an archive, as torch.save has written them since torch 1.6.

    Returns:
        The strings; none if the file is missing, damaged or no such archive.
    """
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            (member,) = (each for each in archive.infolist() if each.filename.endswith("data.pkl"))
            if member.file_size > _MOST_BYTES:
                return frozenset()
            content = archive.read(member)
        return frozenset(each for _, each, _ in pickletools.genops(content) if type(each) is str)
    except Exception:  # a damaged archive or pickle may cause any
        return frozenset()
