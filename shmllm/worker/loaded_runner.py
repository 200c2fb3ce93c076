"""The base class of the runners: a loaded model, and what a runner needs on every device.

This module owns the parts of a runner that live on the host whatever device computes: token masks
of grammars, prompt embeddings, the pooler, and what other ranks do between steps. It must not know
how a step is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from shmllm.config.engine import EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.core.constraint import Constraint
from shmllm.core.kv_groups import KVGroup
from shmllm.core.plan import StepPlan, StepResult
from shmllm.errors import EngineStartError, RequestError
from shmllm.models.fields import Fields
from shmllm.models.lora import read_files
from shmllm.models.model import Model
from shmllm.params.items import Item
from shmllm.params.sampling import SamplingParams
from shmllm.plugins.kv_connector import KVConnector
from shmllm.shared_kv.peers import SharedCache
from shmllm.version import __version__
from shmllm.worker.adapters import GroupAdapterMaker
from shmllm.worker.custom_processors import CustomProcessors
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.grammar_masks import GrammarMasks
from shmllm.worker.item_checks import check_item, check_item_embeds
from shmllm.worker.item_encoders import Send
from shmllm.worker.items import make_item_embeds
from shmllm.worker.load_processors import ProcessorClasses
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory_owners import OwnedMemory
from shmllm.worker.pooler import Pooler
from shmllm.worker.prompt_embeds import EmbedsByRow, check_prompt_embeds
from shmllm.worker.ranks import Ranks

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Observe = Callable[[str], AbstractContextManager[object]]
"""Makes a context manager from a kernel's label; a profiler records what runs inside it."""


class SubmittedStep(Protocol):
    """A step that was submitted to a runner."""

    def release(self) -> None:
        """Let the step use the tokens of the step before: the batch and the constraints have
        them now."""

    def result(self) -> StepResult:
        """Wait for the step, and return its result."""


class LoadedRunner(ABC):
    """A loaded model that executes step plans, in the order in which they are submitted.

    Args:
        config: the engine's configuration.
        loaded: the model.
        ranks: the other ranks, which may have parts of the model.
        embeds_scale: the factor of prompts' embeddings; 1 if a step multiplies them itself.
        head: computes the model's head; see `Pooler`.
        send: copies an array to where it computes.

    Attributes:
        info: what the engine reports about itself.
        kv_groups: the groups of layers, which have a block table each.
        began_s: when its weights began to be read, in seconds since 1970.
        max_in_flight: how many steps may be submitted at a time: 1; 2 if `submit` returns before
            the step has run, so that the core can prepare the next one meanwhile; or the number of
            batches of a pipeline.
        memory: the memory that can be given back while the engine sleeps.
        items: the embeddings of items.
        masks: the token masks of constrained requests.
        pooler: computes the vectors of pooling requests.
        processors: the custom logits processors; None if there are none.
        shared_cache: where the blocks of other engines are read; None: nowhere.
    """

    info: EngineInfo
    kv_groups: tuple[KVGroup, ...]
    began_s: float = math.inf
    max_in_flight: int
    memory: OwnedMemory
    processors: CustomProcessors | None = None
    shared_cache: SharedCache | None = None

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        ranks: Ranks,
        embeds_scale: float = 1.0,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
        send: Send = torch.tensor,
    ) -> None:
        directory = Path(config.load.tokenizer_directory or config.load.directory)
        self._loaded = loaded
        self._ranks = ranks
        if ranks.memory.size > 1:
            loaded.model.followers = ranks
        self._adapters: GroupAdapterMaker | None = None
        self._grammars = GrammarCompiler(directory, loaded.config.eos_token_ids)
        self._prompt_embeds = EmbedsByRow(embeds_scale)
        self.items = make_item_embeds(loaded, send)
        self.masks = GrammarMasks(self._grammars, config.max_samples)
        spec = loaded.config.head
        self.pooler = Pooler(head, spec is not None and spec.precedes_means)

    @abstractmethod
    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Start a step, behind the steps that were submitted before."""

    @abstractmethod
    def use_processors(self, classes: ProcessorClasses) -> None:
        """Make custom logits processors of these classes, and call them in each step that samples.

        Raises:
            EngineStartError: a constructor raised.
        """

    @abstractmethod
    def observe(self, observe: Observe | None) -> None:
        """Run each kernel inside the context manager that `observe` makes; None ends that. A
        runner whose kernels torch's profiler sees by itself ignores the call."""

    def use_connector(self, connector: KVConnector, name: str) -> None:
        """Call a KV connector around each step.

        Args:
            connector: the connector.
            name: its name, for messages.

        Raises:
            EngineStartError: it does not take the blocks.
        """
        raise EngineStartError("kv_connector is for the CPU: pass device='cpu', or leave it out")

    def numerics(self) -> dict[str, Any]:
        """Return what decides the bits of keys and values, beside the weights and the tokens."""
        info = self.info
        return {
            "version": __version__,
            "config": repr(self._loaded.config),
            "dtype": info.dtype,
            "quantization": info.quantization,
            "activation_dtype": info.activation_dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "instructions": info.instructions,
            "torch": torch.__version__,
        }

    @property
    def block_parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """For blocks of keys and values, and for those of states: the number of buffers that have
        parts of a block, in all ranks, and the size of a part."""
        raise NotImplementedError

    def trace(self, directory: Path) -> None:
        """Let the other ranks record their steps in a trace.

        Args:
            directory: the directory of the trace.
        """
        self._ranks.elsewhere("begin_trace", directory)

    def begin_recording(self) -> None:
        """Let the other ranks record their steps."""
        self._ranks.elsewhere("begin_recording")

    def end_recording(self) -> None:
        """Let them stop."""
        self._ranks.elsewhere("end_recording")

    def write_recording(self, path: Path) -> None:
        """Let them write what they have recorded.

        Args:
            path: where this process writes its own trace; see `profile.path_of_rank`.
        """
        self._ranks.elsewhere("write_recording", path.absolute())

    def read_lora(self, directory: str) -> object:
        """Read an adapter into the form in which steps compute with it, which has a `digest`.

        Raises:
            EngineStartError: it cannot be read, or does not suit the model.
        """
        assert self._adapters is not None, "the engine has adapters"
        return self._adapters.adapter_of(*read_files(Path(directory)))

    def make_lora(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> object:
        """As `read_lora`, from the fields of adapter_config.json and the tensors of
        adapter_model.safetensors, which are copied."""
        assert self._adapters is not None, "the engine has adapters"
        return self._adapters.adapter_of(
            Fields(dict(config), "the adapter's config"), Fields(dict(tensors), "the adapter")
        )

    def _drop_adapters(self) -> None:
        """Let the other ranks free the adapters that this process has freed."""
        if self._adapters is not None:
            self._adapters.drop_unused()

    def check(self) -> None:
        """Raise if another rank has ended."""
        self._ranks.memory.check()

    def watch(self, report: Callable[[int], None]) -> None:
        """See `Ranks.watch`."""
        self._ranks.watch(report)

    def everywhere(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        """Run a function in each other rank, with that rank's worker as its first argument, and
        `own` in this one. Each has its part of the model. Returns the results, by rank.

        Args:
            own: what this process runs.
            pickled: returns the function, its arguments and its keyword arguments as a pickle.
        """
        followers, self.model.followers = self.model.followers, None
        try:
            return self._ranks.call(own, pickled)
        finally:
            self.model.followers = followers

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of one of the model's `destinations`. Each rank has zeros where others have
        their parts."""
        found = self._ranks.everywhere(
            self.model.destinations()[name][0].clone, "read_weight", name
        )
        if len(found) == 1:
            return found[0]
        kind = found[0].dtype
        bits, *others = (each.cpu().view(_BITS[kind.itemsize]) for each in found)
        for each in others:
            bits |= each
        return bits.view(kind)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    @property
    def model(self) -> Model:
        """The model; its weights may be replaced between two steps."""
        return self._loaded.model

    def reload_weights(self, directory: str | None) -> str:
        """See `LoadedModel.reload`."""
        model, loaded = self.model, self._loaded
        try:
            own, *_ = self._ranks.everywhere(lambda: loaded.reload(directory), "reload", directory)
        except Exception:
            # Weights that only some of the ranks have read are of no use.
            versions = self._ranks.everywhere(lambda: model.weights_version, "weights_version")
            if len(set(versions)) > 1:
                self._ranks.everywhere(model.weights_damaged, "damage_weights")
            raise
        return own

    def keeps_state_of(self, row: int) -> bool:
        """Whether a custom logits processor keeps a state for a row's request, so that it must not
        see tokens that are drafted and not sampled."""
        return self.processors is not None and self.processors.keeps_state_of(row)

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError if a custom logits processor refuses the parameters."""
        if self.processors is not None:
            self.processors.check(params)

    def check_embeds(self, embeds: torch.Tensor, length: int) -> torch.Tensor:
        """Convert a prompt's embeddings to the model's dtype.

        Args:
            embeds: (length, hidden_size), any floating dtype.
            length: tokens of the prompt.

        Raises:
            RequestError: see `check_prompt_embeds`, or ids decide which experts tokens have.
        """
        config = self.model.config
        if any(mixture.reads_ids for mixture in config.mixtures):
            raise RequestError(
                f"prompt_embeds are not possible for {config.architecture}: the ids of tokens "
                "decide which experts they have"
            )
        shape = (length, config.embedding_width)
        return check_prompt_embeds(embeds, shape, self.model.dtype)

    def check_item(self, item: Item) -> None:
        """Check that an item is what a tower takes.

        Raises:
            RequestError: its data or its number of embeddings are not those of its grid.
        """
        config = self.model.config
        if item.is_embeds:
            check_item_embeds(item, config.towers, config.item_width, self.model.dtype)
        else:
            check_item(item, config.towers)

    def compile_grammar(self, text: str) -> Future[Callable[[], Constraint]]:
        """See `GrammarCompiler.compile`."""
        return self._grammars.compile(text)
