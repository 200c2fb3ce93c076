"""Loads the model that drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from shmllm.config.engine import EngineConfig
from shmllm.config.load import DTypeName, LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.drafting_model import DraftingModel
from shmllm.worker.arena import Contents
from shmllm.worker.loading import Check, LoadedModel, load_model, model_config
from shmllm.worker.memory import MemoryPool


def draft_config(config: EngineConfig, target: LoadedModel) -> ModelConfig | None:
    """Return the configuration of the model that drafts, for whose keys and values all ranks have
    room; None: the options name none.

    Args:
        config, target: as for `load_draft`.

    Raises:
        EngineStartError: it cannot be read.
    """
    own = _options(config, target)
    return None if own is None else model_config(own)


def load_draft(
    config: EngineConfig,
    target: LoadedModel,
    pool: MemoryPool,
    auto_dtype: Callable[[str | None], str],
    check: Check,
) -> LoadedModel | None:
    """Load the model that drafts for another one. In a group rank 0 alone does so, and computes all
    of its steps: the others get the drafted tokens with the inputs of the step that verifies them.

    Args:
        config: the engine's configuration.
        target: the other model.
        pool, auto_dtype, check: as for `load_model`.

    Returns:
        The model; None: the options name none.

    Raises:
        EngineStartError: it cannot be loaded, or does not suit the other model.
    """
    own = _options(config, target)
    if own is None:
        return None
    directory, loaded = own.directory, load_model(own, pool, auto_dtype, check)
    sizes = loaded.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise EngineStartError(
            f"the draft model {directory} has {sizes[0]:,} token ids and the model {sizes[1]:,}: "
            "both must have the same tokenizer"
        )
    if any(loaded.config.layer_state_bytes):
        raise EngineStartError(f"the draft model {directory} has recurrent states: take another")
    if isinstance(loaded.model, DraftingModel):
        assert isinstance(target.model, DecoderModel), "the options refuse it for others"
        drafting = loaded.config.drafting
        assert drafting is not None, "it is such a model"
        if target.config.shard.size > 1 and drafting.lacks:
            raise EngineStartError(
                f"the head {directory} has no {drafting.lacks[0]} of its own, and of the model's "
                "each rank has a part: leave tensor_parallel_size out"
            )
        loaded.model.borrow(target.model)
    return loaded


def _options(config: EngineConfig, target: LoadedModel) -> LoadConfig | None:
    """Return the options by which the model that drafts is loaded; None: there is none."""
    directory, activations = config.speculative.model_directory, config.load.activation_dtype
    if not directory:
        return None
    return replace(
        config.load,
        directory=directory,
        hf_overrides=None,
        dtype=cast(DTypeName, target.dtype_name),
        quantization=None,
        # Integers multiply packed weights only, which it may lack.
        activation_dtype="auto" if activations in ("int16", "int8") else activations,
        max_model_len=None,
        further_layers=0,
        kept_levels=(),
        returns_experts=False,
        model_impl="auto",
        decode_kernel="auto",
        language_model_only=True,  # it drafts for text
    )


class ReloadedArena:
    """The arena of weights that are read again if a sleep has lost them: nobody sends them.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._arena = loaded.weights
        self.num_bytes = self._arena.num_bytes

    @property
    def resident_bytes(self) -> int:
        """The memory that the weights take now."""
        return self._arena.resident_bytes

    @property
    def contents(self) -> Contents:
        """Where the weights are."""
        return self._arena.contents

    def release(self, keep: bool = False) -> None:
        """Give the memory back; see `Arena`."""
        self._arena.release(keep)

    def restore(self) -> None:
        """Take the memory again, and read the weights if they were lost.

        Raises:
            MemoryError: there is not enough memory, or the weights cannot be read; the memory is
                given back.
        """
        was_lost = self._arena.contents is Contents.LOST
        self._arena.restore()
        if not was_lost:
            return
        try:
            self._loaded.reload(None)
        except EngineStartError as problem:
            self._arena.release()
            raise MemoryError(f"the draft model: {problem}") from problem
