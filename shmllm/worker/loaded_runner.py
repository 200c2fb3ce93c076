"""The base class of the runners: a loaded model, and what a runner needs on every device.

This module owns the parts of a runner that live on the host whatever device computes: token masks
of grammars, prompt embeddings, and the pooler. It must not know how a step is computed.
"""

from __future__ import annotations

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
from shmllm.models.fields import Fields
from shmllm.models.lora import read_files
from shmllm.models.model import Model
from shmllm.params.sampling import SamplingParams
from shmllm.worker.custom_processors import CustomProcessors
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.grammar_masks import GrammarMasks
from shmllm.worker.load_processors import ProcessorClasses
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory_owners import OwnedMemory
from shmllm.worker.pooler import Pooler
from shmllm.worker.prompt_embeds import EmbedsByRow, check_prompt_embeds

Observe = Callable[[str], AbstractContextManager[object]]
"""Makes a context manager from a kernel's label; a profiler records what runs inside it."""


class SubmittedStep(Protocol):
    """A step that was submitted to a runner."""

    def release(self) -> None:
        """Let the step use the tokens of the step before: the batch and the constraints have
        them now."""

    def result(self) -> StepResult:
        """Wait for the step, and return its result."""


class AdapterMaker(Protocol):
    """Brings adapters into the form in which a device computes with them."""

    def adapter_of(self, config: Fields, tensors: Fields) -> object:
        """Return an adapter. Raises EngineStartError if it does not suit the model."""


class LoadedRunner(ABC):
    """A loaded model that executes step plans, in the order in which they are submitted.

    Args:
        config: the engine's configuration.
        loaded: the model.
        embeds_scale: the factor of prompts' embeddings; 1 if a step multiplies them itself.

    Attributes:
        info: what the engine reports about itself.
        kv_groups: the groups of layers, which have a block table each.
        max_in_flight: how many steps may be submitted at a time: 1; 2 if `submit` returns before
            the step has run, so that the core can prepare the next one meanwhile; or the number of
            batches of a pipeline.
        memory: the memory that can be given back while the engine sleeps.
        masks: the token masks of constrained requests.
        pooler: computes the vectors of pooling requests.
        processors: the custom logits processors; None if there are none.
    """

    info: EngineInfo
    kv_groups: tuple[KVGroup, ...]
    max_in_flight: int
    memory: OwnedMemory
    processors: CustomProcessors | None = None

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, embeds_scale: float = 1.0
    ) -> None:
        num_rows = config.scheduler.max_num_seqs
        directory = Path(config.load.tokenizer_directory or config.load.directory)
        self._loaded = loaded
        self._adapters: AdapterMaker | None = None
        self._grammars = GrammarCompiler(directory, loaded.config.eos_token_ids)
        self._prompt_embeds = EmbedsByRow(embeds_scale)
        self.masks = GrammarMasks(self._grammars, config.max_samples)
        self.pooler = Pooler(num_rows, loaded.config.hidden_size)

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

    def trace(self, directory: Path) -> None:
        """Let the processes that compute for this one record their steps in a trace.

        Args:
            directory: the directory of the trace.
        """
        return

    def begin_recording(self) -> None:
        """Let the other processes that compute for this one record their steps."""
        return

    def end_recording(self) -> None:
        """Let them stop."""
        return

    def write_recording(self, path: Path) -> None:
        """Let them write what they have recorded.

        Args:
            path: where this process writes its own trace; see `profile.path_of_rank`.
        """
        return

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

    def check(self) -> None:
        """Raise if a process that computes for this one has ended."""
        return

    def watch(self, report: Callable[[int], None]) -> None:
        """Call `report`, on any thread, with the pid of a process that computes for this one when
        a signal has stopped it, and with 0 when it goes on."""
        return

    def everywhere(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        """Run a function in each other process that computes for this one, with that process's
        worker as its first argument, and `own` in this one. Returns the results, by rank.

        Args:
            own: what this process runs.
            pickled: returns the function, its arguments and its keyword arguments as a pickle.
        """
        return [own()]

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of one of the model's `destinations`."""
        return self.model.destinations()[name][0].clone()

    def close(self) -> None:
        """End the processes that compute for this one."""
        return

    @property
    def model(self) -> Model:
        """The model; its weights may be replaced between two steps."""
        return self._loaded.model

    def reload_weights(self, directory: str | None) -> str:
        """See `LoadedModel.reload`."""
        return self._loaded.reload(directory)

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
            RequestError: see `check_prompt_embeds`.
        """
        shape = (length, self.model.config.hidden_size)
        return check_prompt_embeds(embeds, shape, self.model.dtype)

    def compile_grammar(self, text: str) -> Future[Callable[[], Constraint]]:
        """See `GrammarCompiler.compile`."""
        return self._grammars.compile(text)
