"""Reads checkpoints that torch.save has written: one file, or shards with an index.

Such a file is a zip archive of a pickle and the tensors' memory, which is mapped. torch's unpickler
for weights reads the pickle: it makes tensors and plain containers only, and runs no code of the
file. Files of torch before 1.6, which are no archives, and compressed archives are read into memory
as a whole.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.formats.pickled_names import pickled_storages, read_pickle
from shmllm.formats.text_files import one_line
from shmllm.models.tensor_files import UnchangedFile, find_shards, reading, release_pages

SINGLE_PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64),
)
_LONGEST_REASON = 200
_UNPICKLER_REASON = re.compile(r"(?:WeightsUnpickler error: |Trying to load )([^\n]*)")
"""What is wrong, in a message whose other sentences advise to run the file's code."""


class PickleFile(UnchangedFile):
    """One file; see `checkpoint.CheckpointFile`.

    Args:
        path: the file, a state dict: tensors by their names.
        prefix: what stands before the names that the file has, in all names here.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        super().__init__(path)
        self._prefix = prefix
        self._tensors: dict[str, Tensor] = {}
        self._is_mapped = False

    def _open(self) -> None:
        try:
            self._is_mapped = _check_storages(self.path)
            found = torch.load(
                str(self.path), map_location="cpu", weights_only=True, mmap=self._is_mapped
            )
        except (OSError, EngineStartError):
            raise
        except pickle.UnpicklingError as error:
            reason = _UNPICKLER_REASON.search(str(error))
            why = f" ({reason[1][:_LONGEST_REASON].rstrip('.')})" if reason else ""
            raise EngineStartError(
                f"{self.path} has more than tensors, or is damaged, and is not read{why}; if you "
                "trust it, load it with transformers and save it again with save_pretrained()"
            ) from None
        except Exception as error:  # a damaged pickle may cause any
            raise EngineStartError(
                f"{self.path} is damaged or no file of torch.save "
                f"({type(error).__name__}: {one_line(error)[:_LONGEST_REASON]}); copy or download "
                "it again"
            ) from None
        if not isinstance(found, dict):
            raise EngineStartError(f"{self.path} has a {type(found).__name__}, no tensors by names")
        for name, tensor in found.items():
            self._check_entry(name, tensor)
        # A parameter of a module would record what is done with it.
        self._tensors = {f"{self._prefix}{name}": each.detach() for name, each in found.items()}

    def _check_entry(self, name: object, tensor: object) -> None:
        if not isinstance(name, str) or not name.isprintable():
            raise EngineStartError(f"{self.path} has a tensor with the name {name!r:.80}")
        if not isinstance(tensor, Tensor):
            raise EngineStartError(
                f"{self.path}: {name} is no tensor but a {type(tensor).__name__}; load the file "
                "with torch and save the tensors by their names"
            )
        if tensor.layout != torch.strided:
            raise EngineStartError(
                f"{self.path}: {name} has layout {tensor.layout}; supported: torch.strided"
            )
        if tensor.is_meta:
            raise EngineStartError(f"{self.path}: {name} has no numbers: it is on the device meta")

    def _close(self) -> None:
        self._tensors = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def check(self, name: str) -> None:
        dtype = self._tensors[name].dtype
        if dtype not in _DTYPES:
            known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise EngineStartError(
                f"{self.path}: {name} has type {str(dtype).removeprefix('torch.')}; supported: "
                f"{known}"
            )

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        self._check_unchanged()
        self.check(name)
        tensor = self._tensors[name]
        with reading(tensor, f"{name} in {self.path}"):
            yield tensor.contiguous()
        # Tensors may share memory, which the file has once.
        self.num_bytes_read = min(self.num_bytes_read + tensor.nbytes, self.num_bytes)
        if self._is_mapped:
            release_pages(tensor)


def _check_storages(path: Path) -> bool:
    """Checks that an archive has the memory of its tensors. torch believes the sizes in the pickle,
    and would read on behind a member that has fewer bytes.

    Returns:
        Whether the file is an archive with its members as they are, not compressed.

    Raises:
        EngineStartError: a member has another size than its tensors.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # torch's reader does not distinguish the case of names.
        sizes = {each.filename.lower(): each.file_size for each in members}
        if len(sizes) != len(members):
            raise EngineStartError(f"{path} is damaged: two of its members have one name")
        name, content = read_pickle(archive)
    for key, num_bytes in pickled_storages(content):
        member = f"{name.removesuffix('data.pkl')}data/{key}"
        size = sizes.get(member.lower(), 0)
        if size != num_bytes:
            raise EngineStartError(
                f"{path} is damaged: its member {member!r} has {size:,} bytes, its tensors "
                f"{num_bytes:,}; copy or download it again"
            )
    return all(each.compress_type == zipfile.ZIP_STORED for each in members)


def find_pickles(directory: Path) -> list[PickleFile]:
    """The files of a checkpoint in a directory; none if it has none that torch.save has written.

    Raises:
        EngineStartError: the index is damaged, or a file that it lists is missing.
    """
    return [PickleFile(path) for path in find_shards(directory, SINGLE_PICKLE, PICKLE_INDEX)]
