"""Fills a module's weights from the files of a checkpoint, or with random numbers.

transformers' `from_pretrained` decides which tensors of files become which parameters. Its tensors
lie in the mapped files, unless it converts them; each is freed when it has been copied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint import stored_twice
from shmllm.models.safetensors_file import INDEX_FILE, SINGLE_FILE, find_safetensors
from shmllm.models.tensor_files import reading, release_pages
from shmllm.models.transformers_impl.module import error_words
from shmllm.models.transformers_impl.storage import weights_of

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded so far and the total number of bytes."""

_FAULTS = {
    "missing_keys": "the checkpoint in {} lacks {}",
    "unexpected_keys": "the checkpoint in {} has a tensor the model lacks: {}",
    "error_msgs": "the checkpoint in {} cannot be read: {}",
}
"""What transformers reports of a checkpoint, and how an error says it."""


def copy_weights(
    module: Any, stored: Mapping[str, Tensor], loaded: Any, on_progress: Progress | None
) -> None:
    """Overwrites all weights of a module with those of another one, which loses them.

    Args:
        module: the module.
        stored: its weights, by name.
        loaded: the other module, from `open_checkpoint`.
        on_progress: called with (bytes copied, bytes in all).
    """
    owners, weights = _owners(loaded), weights_of(loaded)
    places = Counter(each.data_ptr() for each in weights.values())
    total, done = sum(each.nbytes for each in stored.values()), 0
    for name, own in stored.items():
        tensor = weights.pop(name)
        with reading(tensor, name):
            own.copy_(tensor)
        for owner, last in owners[id(tensor)]:
            owner[last] = None
        if tensor.is_contiguous() and places[tensor.data_ptr()] == 1:
            release_pages(tensor)
        del tensor
        done += own.nbytes
        if on_progress is not None:
            on_progress(done, total)
    _copy_constants(module, loaded)


def set_random(module: Any, seed: int) -> None:
    """Fills all weights as transformers initialises a new module of the class.

    Args:
        module: the module.
        seed: the same seed gives the same weights on the same kind of device.
    """
    for child in module.modules():
        child._is_hf_initialized = False
    device = next(module.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        module.initialize_weights()


def open_files(directory: Path) -> ExitStack:
    """Opens the safetensors files of a checkpoint, while transformers reads them.

    Returns:
        What closes the files. It raises EngineStartError if one of them has changed since.

    Raises:
        EngineStartError: the files are missing or damaged, or two have the same tensor.
    """
    files = find_safetensors(directory)
    if not files:
        raise EngineStartError(
            f"no weights in {directory}: looked for {SINGLE_FILE} and {INDEX_FILE}"
        )
    owners: dict[str, Path] = {}
    with ExitStack() as opened:
        for file in files:
            for name in opened.enter_context(file).shapes():
                if name in owners:
                    raise stored_twice(name, owners[name], file.path)
                owners[name] = file.path
        return opened.pop_all()


def open_checkpoint(module: Any, directory: Path) -> Any:
    """Returns a module with the weights of a checkpoint in safetensors files.

    Args:
        module: a module of the same class; its configuration says how files are converted.
        directory: the checkpoint's, whose files are open.

    Raises:
        EngineStartError: the files are damaged, or not those of such a model. The message is one
            line.
    """
    try:
        with _quiet():
            loaded, report = type(module).from_pretrained(
                directory,
                config=module.config,
                dtype=module.dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise EngineStartError(
            f"the checkpoint in {directory} cannot be read ({error_words(error)})"
        ) from error
    for name, shape, expected in report["mismatched_keys"]:
        raise EngineStartError(
            f"{directory}: {name} has shape {list(shape)}, the config asks for {list(expected)}"
        )
    for kind, sentence in _FAULTS.items():
        faults = sorted(map(str, report.get(kind) or ()))
        if faults:
            more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
            raise EngineStartError(sentence.format(directory, faults[0]) + more)
    untied = sorted(weights_of(loaded).keys() - weights_of(module).keys())
    if untied:
        raise EngineStartError(
            f"the checkpoint in {directory} has {untied[0]}, which differs from what config.json "
            'ties it to: write "tie_word_embeddings": false there'
        )
    return loaded


def _owners(module: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Returns where a module holds each parameter and buffer, by its `id`."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for child in module.modules():
        for owner in (child._parameters, child._buffers):
            for last, each in owner.items():
                found[id(each)].append((owner, last))
    return found


def _copy_constants(module: nn.Module, loaded: nn.Module) -> None:
    """Copies the buffers that checkpoints have and that are no weights."""
    buffers = dict(loaded.named_buffers())
    for name, own in module.named_buffers():
        if not own.is_floating_point() and name in buffers:
            own.copy_(buffers[name])


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports nothing inside of the block: errors say what it found."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
