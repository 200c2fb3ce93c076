"""What an engine asks of any loaded model: its configuration, and its weights by name.

This module owns the state of the weights: which are missing, and whether their memory is there. It
must not know how a model computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.layers import NamedWeights
from shmllm.models.matrices import Destination, addresses
from shmllm.models.weight_names import BUFFER_SUFFIXES, OTHER_LAYOUT
from shmllm.models.weight_update import checked_update


class Followers(Protocol):
    """Models in other processes, which get the same weights."""

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights that have been checked, by their names in `Model.destinations`."""


class Model(ABC):
    """A loaded model.

    Args:
        config: the configuration.
        dtype: the dtype of weights and activations.

    Attributes:
        config, dtype: as given.
        weights_version: the number of weight updates since the first load.
        missing: the names of weights whose contents were dropped with their memory and that have
            not been written since.
        num_losses: how often the contents of all weights were dropped.
        followers: the models that get each weight that is written; None: there are none.
        is_asleep: whether the memory of the weights is released. They must not be read or
            written then.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.weights_version = 0
        self.missing: set[str] = set()
        self.num_losses = 0
        self.is_asleep = False
        self.followers: Followers | None = None

    @abstractmethod
    def _name_weights(self) -> NamedWeights:
        """Returns `named_weights`. Called once."""

    @abstractmethod
    def _name_module_weights(self) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules. Called
        once."""

    @abstractmethod
    def known_name(self, name: str) -> str | None:
        """Returns the name in `destinations` for a name in a checkpoint, if there is such a weight.
        None: checkpoints may have the tensor although the model does not keep it."""

    def destination_name(self, name: str, shape: Sequence[int]) -> str | None:
        """Returns the name in `destinations` for a tensor in a checkpoint, as `known_name` does.
        Of a weight that checkpoints have in two layouts the shape decides; if it is that of both,
        it is the layout of transformers' modules, as in transformers.

        Args:
            name: the name in the checkpoint.
            shape: the shape of the tensor there.
        """
        known = self.known_name(name)
        views = self._destinations.get(f"{known}{OTHER_LAYOUT}")
        if known is None or views is None or tuple(shape) != tuple(views[0].shape):
            return known
        is_square = tuple(shape) == tuple(self._destinations[known][0].shape)
        return known if is_square else f"{known}{OTHER_LAYOUT}"

    def weights_changed(self, names: Iterable[str]) -> None:
        """Records that weights were written. The writer calls this, between two steps.

        Args:
            names: the names under which weights were written.
        """
        self.missing.difference_update(self.written(names))
        self.weights_version += 1

    def check_awake(self) -> None:
        """Raises RequestError if the memory of the weights is released."""
        if self.is_asleep:
            raise RequestError("the weights are asleep: wake_up(tags=['weights']) first")

    def weights_lost(self) -> None:
        """Records that the contents of all weights were dropped with their memory."""
        self.missing = set(self.named_weights())
        self.num_losses += 1

    def save_buffers(self) -> dict[str, Tensor]:
        """Returns copies, in the memory of the host, of the weights that transformers' modules have
        as buffers. Trainers send parameters only, so a sleep has to keep these."""
        buffers = (name for name in self.named_weights() if self.is_buffer(name))
        return {name: self._named_weights[name][0].clone().cpu() for name in buffers}

    def restore_buffers(self, saved: Mapping[str, Tensor]) -> None:
        """Writes what `save_buffers` returned."""
        for name, values in saved.items():
            for view in self._named_weights[name]:
                view.copy_(values)
        self.missing.difference_update(saved)

    def is_buffer(self, name: str) -> bool:
        """Whether one of `named_weights` is a buffer in transformers' modules."""
        return name.endswith(BUFFER_SUFFIXES)

    def weights_damaged(self) -> None:
        """Records that only some of the weights were overwritten: none is of any use."""
        self.weights_lost()
        self.weights_version += 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Overwrites weights in place, all of these or none; see `weight_update.checked_update`.

        Args:
            weights: pairs of a name in the checkpoint and a tensor of that weight's shape.

        Returns:
            The names of the written weights.

        Raises:
            RequestError: the weights are asleep, or a tensor was refused.
        """
        self.check_awake()
        update = checked_update(self.destinations(), weights, self.destination_name)
        if update:
            self.write(update)
        return {name for name, _ in update}

    def write(self, update: Sequence[tuple[str, Tensor]], written: Iterable[str] = ()) -> None:
        """Overwrites weights in place, all copies that the model and its followers keep.

        Args:
            update: names in `destinations`, and tensors that have been checked.
            written: the names of weights of the same update that are in place already.
        """
        self.weights_changed([*written, *(name for name, _ in update)])
        with torch.no_grad():
            for name, tensor in update:
                for view in self._destinations[name]:
                    view.copy_(tensor)
        if self.followers is not None:
            self.followers.write(update)

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of each tensor of a Hugging Face checkpoint.

        Returns:
            A mapping from the checkpoint's name to views of the checkpoint's shape.
            ``view.copy_(tensor)`` on each of a name's views loads or updates that weight,
            ``view.clone()`` reads it.
        """
        return dict(self._named_weights)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Destination]]:
        """Yields each tensor of a checkpoint with its name, as a torch module does, for programs
        that look for names. `load_weights` writes them."""
        return ((name, views[0]) for name, views in self._named_weights.items())

    def named_buffers(self) -> Iterator[tuple[str, Destination]]:
        """Yields nothing: `load_weights` also writes what torch modules have as buffers."""
        return iter(())

    def compute_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits from which a step's tokens are sampled: the argument.

        A class that extends the workers may assign a function to this attribute of a model, which
        calls this method and changes the result, for example to forbid tokens. Each step calls it
        before everything else that changes logits, and ends the engine if it raises. Scores of
        prompts do not.

        Args:
            logits: (rows, vocab) of a floating dtype; may be changed in place.
        """
        return logits

    def destinations(self) -> NamedWeights:
        """Returns `named_weights`, and the destinations of names that transformers' modules give
        to the same weights, where these differ from those of checkpoints."""
        return dict(self._destinations)

    def written(self, names: Iterable[str]) -> set[str]:
        """Returns which of `named_weights` are written by writing to these `destinations`."""
        return set().union(*(self._covered.get(name, {name}) for name in names))

    @cached_property
    def _named_weights(self) -> NamedWeights:
        return self._name_weights()

    @cached_property
    def _destinations(self) -> NamedWeights:
        return self._name_module_weights() | self._named_weights

    @cached_property
    def _covered(self) -> dict[str, set[str]]:
        """For each of `destinations` that is no name of a checkpoint, the names whose memory it
        covers; of one in another layout, the name that it has there."""
        others = [name for name in self._destinations if name not in self._named_weights]
        plain = {name: name.removesuffix(OTHER_LAYOUT) for name in others}
        covered = {name: {own} & self._named_weights.keys() for name, own in plain.items()}
        spans: dict[int, list[tuple[range, str]]] = {}  # a weight may have several names
        for name in (name for name in others if not covered[name]):
            memory = addresses(self._destinations[name][0])
            spans.setdefault(memory.start, []).append((memory, name))
        starts = sorted(spans)
        for name, (view, *_) in self._named_weights.items() if spans else ():
            begin = addresses(view).start
            index = bisect_right(starts, begin) - 1
            for memory, other in spans[starts[index]] if index >= 0 else ():
                if begin in memory:
                    covered[other].add(name)
        return covered
