"""A module of transformers as a model of the engine: its weights by name, and its forward pass.

The weights are parameters, and buffers that checkpoints have; `storage` gives them memory. This
module must not know how attention is computed, nor what a step is.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.config import ModelConfig
from shmllm.models.layers import NamedWeights, Storage
from shmllm.models.model import Model
from shmllm.models.transformers_impl.body import Head, run_body
from shmllm.models.transformers_impl.names import Part, names_in_files
from shmllm.models.transformers_impl.probe import Layers
from shmllm.models.transformers_impl.weights import (
    Progress,
    copy_weights,
    open_checkpoint,
    open_files,
    set_random,
)


class TransformersModel(Model):
    """A module with its weights.

    Args:
        module: the module, from `module.make_module`.
        stored: its weights by their names in it, from `storage.give_memory`.
        layers: what its layers ask of attention.
        config: the model's configuration.
        dtype: the dtype of weights and activations.

    Attributes:
        module: as given.
        layers: by the `id` of the module that calls the attention function, its layer. Each call
            puts its sinks into those of the layer.
    """

    def __init__(
        self,
        module: Any,
        stored: dict[str, Tensor],
        layers: Layers,
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, dtype)
        self.module = module
        self._stored = stored
        self._buffers = frozenset(name for name, _ in module.named_buffers())
        self._head = Head(module)
        device = next(iter(stored.values())).device
        storage = Storage(partial(_zeros, device), dtype)
        self.layers = {
            id(caller): AttentionHeads(index, spec, storage)
            for index, (caller, spec) in enumerate(zip(layers.modules, layers.specs, strict=True))
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, [tokens, hidden]."""
        embeds: Tensor = self.module.get_input_embeddings()(token_ids[None])[0]
        return embeds

    def hidden(self, token_ids: Tensor, positions: Tensor, embeds: Tensor | None = None) -> Tensor:
        """Runs tokens through all layers and the final norm, inside of `interface.attending`.

        Args:
            token_ids: [tokens] int64; ignored if there are embeddings.
            positions: [tokens] int64.
            embeds: [tokens, hidden], the embeddings to use; None: those of the tokens.

        Returns:
            [tokens, hidden].
        """
        return run_body(self.module, token_ids, positions, embeds)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab], of hidden states, [rows, hidden]."""
        return self._head(hidden)

    def load(self, directory: Path, on_progress: Progress | None = None) -> None:
        """Overwrites all weights with those of a checkpoint; see `weights.open_files` and
        `weights.open_checkpoint` for the errors, which change nothing. If a file changes while it
        is copied, all weights are missing."""
        with open_files(directory) as files:
            loaded = open_checkpoint(self.module, directory)
            try:
                copy_weights(self.module, self._stored, loaded, on_progress)
                files.close()
            except BaseException:
                self.weights_damaged()
                raise

    def load_random(self, seed: int) -> None:
        """Overwrites all weights with random ones; see `weights.set_random`."""
        set_random(self.module, seed)

    def known_name(self, name: str) -> str | None:
        return None if name in self._further_names else name

    def is_buffer(self, name: str) -> bool:
        return self._parts[name].parameter in self._buffers

    def _name_weights(self) -> NamedWeights:
        return {
            name: (part.of(self._stored[part.parameter]),) for name, part in self._parts.items()
        }

    def _name_module_weights(self) -> NamedWeights:
        return {name: (each,) for name, each in self._stored.items()}

    @cached_property
    def _parts(self) -> dict[str, Part]:
        """The parts of the weights, by their names in files."""
        shapes = {name: tuple(each.shape) for name, each in self._stored.items()}
        return names_in_files(self.module, shapes)

    @cached_property
    def _further_names(self) -> frozenset[str]:
        """The names of what is no weight of its own: it is shared, or a constant."""
        return frozenset(self.module.state_dict().keys() - self.destinations().keys())


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
