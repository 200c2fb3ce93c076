"""Fills a model's weights from safetensors files, or with random numbers.

The names and shapes in the files' headers are checked first, so that an error leaves the model
unchanged. Files are memory-mapped and their pages are released once they were copied: the process
holds no more than one tensor of a checkpoint in memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.decoder import DecoderModel
from shmllm.models.fields import Fields, read_json_object
from shmllm.models.layers import NamedWeights
from shmllm.models.weight_update import is_ignored

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded so far and the total number of bytes."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    num_bytes: int
    names: tuple[str, ...]


def load_weights(model: DecoderModel, directory: Path, on_progress: Progress | None = None) -> None:
    """Copies a checkpoint into the model and converts it to the model's dtype.

    Args:
        model: the model whose weights are overwritten.
        directory: contains model.safetensors, or shards with model.safetensors.index.json.
        on_progress: called after each tensor; in the last call both numbers are equal.

    Raises:
        EngineStartError: a file is missing or damaged, or a tensor is missing, unknown or of the
            wrong shape. The message is one line and names it.
    """
    directory = Path(directory)
    destinations = model.named_weights()
    shards = [
        _read_header(path, destinations, model.config.tie_word_embeddings)
        for path in _checkpoint_files(directory)
    ]
    _check_complete(destinations, shards, directory)
    total = sum(shard.num_bytes for shard in shards)
    done = 0
    for shard in shards:
        read = 0
        with _open(shard.path) as file:
            for name in shard.names:
                tensor = file.get_tensor(name)
                for view in destinations[name]:
                    view.copy_(tensor)
                _release_pages(tensor)
                read += tensor.nbytes
                if on_progress is not None and name != shard.names[-1]:
                    on_progress(done + read, total)
        done += shard.num_bytes
        if on_progress is not None:
            on_progress(done, total)


def load_dummy_weights(model: DecoderModel, seed: int = 0) -> None:
    """Fills the norms' weights with ones, all others with small normally distributed numbers.

    Args:
        model: the model whose weights are overwritten.
        seed: the same seed gives the same weights on the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, views in model.named_weights().items():
        first, *others = views
        if first.device not in generators:
            generators[first.device] = torch.Generator(first.device).manual_seed(seed)
        value = first if isinstance(first, Tensor) else torch.empty(first.shape, dtype=first.dtype)
        if name.endswith("norm.weight"):
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=generators[first.device])
        for view in others if value is first else views:
            view.copy_(value)


def _release_pages(tensor: Tensor) -> None:
    """Releases the pages of a tensor in a mapped file, which is not read again.

    Without this they would count as the process's memory until the file is closed, and a file has
    some gigabytes.
    """
    # Only the pages that contain nothing else: safetensors may return a copy in ordinary memory.
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin:
        address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        _libc.madvise(address, size, mmap.MADV_DONTNEED)


def _checkpoint_files(directory: Path) -> list[Path]:
    single, index = directory / _SINGLE_FILE, directory / _INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise EngineStartError(
            f"no weights in {directory}: looked for {_SINGLE_FILE} and {_INDEX_FILE}"
        )
    fields = Fields(read_json_object(index), str(index))
    names = fields.table("weight_map").values()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise fields.error("'weight_map' must map tensor names to file names")
    files = [directory / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise EngineStartError(f"missing shard {file}, which {_INDEX_FILE} lists")
    return files


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise EngineStartError(f"cannot read {path}: {error}") from None
    except SafetensorError as error:
        raise EngineStartError(
            f"{path} is damaged or not a safetensors file ({error}); copy or download it again"
        ) from None


def _read_header(path: Path, destinations: NamedWeights, tied: bool) -> _Shard:
    """Checks the names and shapes of the tensors in one file."""
    with _open(path) as file:
        names = [
            name
            for name in file.keys()  # noqa: SIM118
            if not is_ignored(name, tied)
        ]
        unknown = [name for name in names if name not in destinations]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise EngineStartError(f"{path} has a tensor the model lacks: {unknown[0]}{more}")
        for name in names:
            shape, expected = file.get_slice(name).get_shape(), destinations[name][0].shape
            if tuple(shape) != tuple(expected):
                raise EngineStartError(
                    f"{path}: {name} has shape {list(shape)}, the config asks for {list(expected)}"
                )
    return _Shard(path, path.stat().st_size, tuple(names))


def _check_complete(destinations: NamedWeights, shards: list[_Shard], directory: Path) -> None:
    stored = {name for shard in shards for name in shard.names}
    missing = [name for name in destinations if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineStartError(f"the checkpoint in {directory} lacks {missing[0]}{more}")
