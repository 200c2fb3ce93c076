"""Fills a model's weights from a checkpoint's files, or with random numbers.

The names, shapes and types in the files' headers are checked first, and such an error leaves the
model unchanged. An error while tensors are read leaves it without weights. Files are memory-mapped
and their pages are released once they were copied: the process holds no more than one tensor of a
checkpoint in memory. Each format has a module of its own (`checkpoint.CheckpointFile`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.build import without_memory
from shmllm.models.checkpoint import CheckpointFile, stored_twice
from shmllm.models.checkpoint_formats.adapted_file import AdaptedFile
from shmllm.models.checkpoint_formats.merged_file import merged_files
from shmllm.models.checkpoint_formats.quantized_file import find_method, quantized_files
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.gguf_file import find_gguf
from shmllm.models.layers import NamedWeights
from shmllm.models.matrices import Destination, Elsewhere, packed_of, parts_of
from shmllm.models.pickle_file import PICKLE_INDEX, SINGLE_PICKLE, PickleFile, find_pickles
from shmllm.models.safetensors_file import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFile,
    find_safetensors,
)
from shmllm.models.sentence_files import read_sentence_files
from shmllm.models.task_adapters import TaskAdapters
from shmllm.models.weight_names import LM_HEAD, model_name

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded so far and the total number of bytes."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file whose header was checked.

    Attributes:
        file: the file.
        num_bytes: its size.
        names: for each tensor that is read from it, the model's name and the name in the file.
        kinds: the formats of the packed ones, by their names in the file.
    """

    file: CheckpointFile
    num_bytes: int
    names: dict[str, str]
    kinds: Mapping[str, str]


def stored_kinds(directory: Path, tied: bool) -> dict[str, str]:
    """Returns the formats (`matrices.FORMATS`) of a checkpoint's packed tensors.

    Args:
        directory: see `load_weights`.
        tied: whether the LM head shares the embedding table.

    Returns:
        The formats by the names in `DecoderModel.destinations`.

    Raises:
        EngineStartError: a file is missing or damaged.
    """
    found = {}
    for file in _checkpoint_files(Path(directory)):
        with file:
            for stored, kind in file.kinds().items():
                name = model_name(stored, tied)
                if name is not None:
                    found[name] = kind
    return found


def has_own_head(directory: Path, config: ModelConfig) -> bool:
    """Returns whether a checkpoint has an LM head that differs from its embedding table, although
    its config.json says that they are tied. transformers uses both of them then
    (``PreTrainedModel.tie_weights``, since version 5).

    Args:
        directory: see `load_weights`.
        config: the model's configuration.

    Raises:
        EngineStartError: a file is missing or damaged.
    """
    has_head = config.lm_head or config.classes_are_tokens
    if not (config.tie_word_embeddings and has_head):
        return False
    files = _files_by_name(directory)
    if LM_HEAD not in files:
        return False
    model, _ = without_memory(config)
    weights, table = model.named_weights(), model.embedding.table
    found = files.get(next(name for name, (view, *_) in weights.items() if view is table))
    return found is not None and not _are_equal(files[LM_HEAD], found)


def tensor_names(directory: Path) -> Collection[str]:
    """Returns the names of a checkpoint's tensors, as the default names are.

    Args:
        directory: see `load_weights`.

    Raises:
        EngineStartError: a file is missing or damaged.
    """
    return _files_by_name(directory).keys()


def _files_by_name(directory: Path) -> dict[str, tuple[CheckpointFile, str]]:
    """Returns the file of each tensor of a checkpoint, and its name there, by the default name."""
    files: dict[str, tuple[CheckpointFile, str]] = {}
    for file in _checkpoint_files(Path(directory)):
        with file:
            known = ((model_name(stored, tied=False), stored) for stored in file.shapes())
            files |= {name: (file, stored) for name, stored in known if name is not None}
    return files


def _are_equal(one: tuple[CheckpointFile, str], other: tuple[CheckpointFile, str]) -> bool:
    """Whether two tensors, each a file and a name there, have the same numbers."""
    with (
        one[0] as file,
        other[0] as other_file,
        file.tensor(one[1]) as tensor,
        other_file.tensor(other[1]) as other_tensor,
    ):
        return torch.equal(tensor, other_tensor)


def load_weights(model: DecoderModel, directory: Path, on_progress: Progress | None = None) -> None:
    """Copies a checkpoint into the model and converts it to the model's dtype.

    Args:
        model: the model whose weights are overwritten.
        directory: contains model.safetensors, or shards with model.safetensors.index.json; or
            pytorch_model.bin, or shards with pytorch_model.bin.index.json; or one GGUF file. If
            modules.json names projections, their directories are there, too, and so is that of the
            adapter of `ModelConfig.task_adapters`.
        on_progress: called after each tensor; in the last call both numbers are equal.

    Raises:
        EngineStartError: a file is missing or damaged, or a tensor is missing, unknown or of the
            wrong shape, or its numbers cannot be computed with. The message is one line and names
            it. If tensors were written already, all weights are missing then.
    """
    directory = Path(directory)
    destinations = model.destinations()
    files = _checkpoint_files(directory)
    adapters = model.config.task_adapters
    if isinstance(adapters, TaskAdapters):
        files = [AdaptedFile(file, adapters) for file in files]
    elif adapters is not None:
        files = merged_files(files, directory / adapters.path)
    files = [*files, *_projections(directory, destinations)]
    files += [_extra_file(directory, name) for name in model.config.extra_files]
    shards = [_read_header(file, destinations, model.destination_name) for file in files]
    absent = _check_complete(model, shards, directory)
    try:
        for view in (view for name in absent for view in destinations[name]):
            view.copy_(torch.zeros(view.shape))
        _copy_all(shards, destinations, on_progress)
        _check_values(model, directory)
    except BaseException:
        model.weights_damaged()
        raise


def _check_values(model: DecoderModel, directory: Path) -> None:
    try:
        model.check_weights()
    except ValueError as problem:
        raise EngineStartError(f"the checkpoint in {directory}: {problem}") from None


def _copy_all(
    shards: Sequence[_Shard], destinations: NamedWeights, on_progress: Progress | None
) -> None:
    total = sum(shard.num_bytes for shard in shards)
    done = 0
    for shard in shards:
        with shard.file as file:
            for number, (name, stored) in enumerate(shard.names.items(), 1):
                _copy(file, stored, destinations[name], shard.kinds.get(stored))
                if on_progress is not None and number < len(shard.names):
                    on_progress(done + file.num_bytes_read, total)
        done += shard.num_bytes
        if on_progress is not None:
            on_progress(done, total)


def _copy(file: CheckpointFile, name: str, views: Sequence[Destination], kind: str | None) -> None:
    """Copies one tensor of a format. A function of its own, because no variable may keep the tensor
    while the next one is read."""
    if all(isinstance(view, Elsewhere) for view in views):
        return
    packed = [each for each in map(packed_of, views) if each is not None and each.kind == kind]
    if len(packed) == len(views):
        for each in packed:
            file.read_packed(name, each)
        return
    with file.tensor(name) as tensor:
        for view in views:
            view.copy_(tensor)


def load_dummy_weights(model: DecoderModel, seed: int = 0) -> None:
    """Fills the norms' weights so that they multiply by one, all others with small normally
    distributed numbers.

    Args:
        model: the model whose weights are overwritten.
        seed: the same seed gives the same weights on the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    neutral = {_key_of(weight): value for weight, value in model.neutral_weights()}

    def neutral_value(view: Destination) -> float | None:
        memory = parts_of(view)[0]
        return neutral.get(_key_of(memory)) if isinstance(memory, Tensor) else None

    for views in model.named_weights().values():
        first, *others = views
        if first.device not in generators:
            generators[first.device] = torch.Generator(first.device).manual_seed(seed)
        # A view that is no row of memory gets its numbers in the order of the checkpoint's tensor.
        if isinstance(first, Tensor) and first.is_contiguous():
            value = first
        else:
            value = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        if (number := neutral_value(first)) is not None:
            value.fill_(number)
        else:
            value.normal_(0.0, 0.02, generator=generators[first.device])
        for view in others if value is first else views:
            view.copy_(value)


def _key_of(weight: Tensor) -> int:
    """The address of a weight. One without memory, of another stage, has none: that of what torch
    knows of its memory, which all its views share."""
    return weight.data_ptr() or int(weight.untyped_storage()._cdata)


def _checkpoint_files(directory: Path) -> Sequence[CheckpointFile]:
    files = find_safetensors(directory)
    method = find_method(directory) if files else None
    if method is not None:
        return quantized_files(files, method)
    found = files or find_pickles(directory) or find_gguf(directory)
    if not found:
        raise EngineStartError(
            f"no weights in {directory}: looked for {SINGLE_FILE} and {INDEX_FILE}, for "
            f"{SINGLE_PICKLE} and {PICKLE_INDEX}, and for one GGUF file"
        )
    return found


def _projections(directory: Path, destinations: NamedWeights) -> list[CheckpointFile]:
    """The files of those of sentence-transformers' projections that the model has."""
    files = read_sentence_files(directory)
    return [
        _open_alone(dense.path, f"{dense.prefix}.")
        for dense in (() if files is None else files.dense)
        if dense.path is not None and f"{dense.prefix}.linear.weight" in destinations
    ]


def _extra_file(directory: Path, name: str) -> CheckpointFile:
    """One of `ModelConfig.extra_files`."""
    for path in (directory / f"{name}.safetensors", directory / f"{name}.pt"):
        if path.is_file():
            return _open_alone(path, f"{name}.")
    raise EngineStartError(f"{directory} has neither {name}.safetensors nor {name}.pt")


def _open_alone(path: Path, prefix: str) -> CheckpointFile:
    """A file of tensors that is no whole checkpoint, by its ending."""
    return (SafetensorsFile if path.suffix == ".safetensors" else PickleFile)(path, prefix)


def _read_header(
    file: CheckpointFile,
    destinations: NamedWeights,
    destination_name: Callable[[str, Sequence[int]], str | None],
) -> _Shard:
    """Checks the names, shapes and types of the tensors in one file."""
    path = file.path
    with file:
        shapes = file.shapes()
        known = ((destination_name(stored, shape), stored) for stored, shape in shapes.items())
        names = {name: stored for name, stored in known if name is not None}
        unknown = [stored for name, stored in names.items() if name not in destinations]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise EngineStartError(f"{path} has a tensor the model lacks: {unknown[0]}{more}")
        for name, stored in names.items():
            shape, expected = list(shapes[stored]), list(destinations[name][0].shape)
            if shape != expected:
                raise EngineStartError(
                    f"{path}: {stored} has shape {shape}, the config asks for {expected}"
                )
            file.check(stored)
        kinds = file.kinds()
    return _Shard(file, file.num_bytes, names, kinds)


def _check_complete(model: DecoderModel, shards: list[_Shard], directory: Path) -> list[str]:
    """Checks that each weight is stored once. Returns those that are 0 because they are not."""
    owners: dict[str, Path] = {}
    for shard in shards:
        for name, stored in shard.names.items():
            if name in owners:
                raise stored_twice(stored, owners[name], shard.file.path)
            owners[name] = shard.file.path
    written = model.written(owners)
    absent = [name for name in model.named_weights() if name not in written]
    missing = [name for name in absent if not name.endswith(model.config.zeros_if_absent)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineStartError(f"the checkpoint in {directory} lacks {missing[0]}{more}")
    return absent
