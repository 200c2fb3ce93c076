"""The interface of a runner, which executes the steps of an engine core.

The core submits a step, releases it, and asks it for its result, in this order. This module must
not know which model or which device computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shmllm.config.info import EngineInfo
from shmllm.core.grammar_queue import CompiledGrammar
from shmllm.core.kv_groups import KVGroup
from shmllm.core.plan import StepPlan, StepResult
from shmllm.engine.sleep import Memory
from shmllm.params.items import Item
from shmllm.params.sampling import SamplingParams
from shmllm.shared_kv.peers import SharedCache


class Step(Protocol):
    """A step that was submitted."""

    def release(self) -> None:
        """Let the step continue: the previous step's tokens have been applied to the requests."""

    def result(self) -> StepResult:
        """Wait for the step's result and return it."""


class Runner(Protocol):
    """Executes plans in the order in which they are submitted.

    Attributes:
        info: the information that the engine reports to front ends.
        kv_groups: the groups of layers, which have a block table each.
        began_s: when its weights began to be read, in seconds since 1970.
        max_in_flight: how many steps may be submitted at a time: 1; 2 if `submit` returns before
            the step has run, so that the core can prepare the next one meanwhile; or the number of
            batches of a pipeline.
    """

    info: EngineInfo
    kv_groups: tuple[KVGroup, ...]
    began_s: float
    max_in_flight: int

    @property
    def memory(self) -> Memory:
        """The memory that can be released while the engine sleeps."""

    @property
    def shared_cache(self) -> SharedCache | None:
        """Where the blocks of other engines are read; None: nowhere."""

    @property
    def block_parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """For blocks of keys and values, and for those of states: the number of buffers that have
        parts of a block, in all processes, and the size of a part."""

    def numerics(self) -> dict[str, Any]:
        """What decides the bits of keys and values, beside the weights and the tokens."""

    @property
    def model(self) -> Any:
        """The model. Its weights may be replaced between two steps."""

    def check(self) -> None:
        """Raise if a process that computes for this one has ended."""

    def watch(self, report: Callable[[int], None]) -> None:
        """Call `report`, on any thread, with the pid of a process that computes for this one when
        a signal has stopped it, and with 0 when it goes on."""

    def trace(self, directory: Path) -> None:
        """Let the processes that compute for this one record their steps in the trace of this
        directory."""

    def everywhere(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        """Run a function in each other process that computes for this one, with that process's
        worker as its first argument, and `own` in this one. Returns the results, by rank.

        Args:
            own: what this process runs.
            pickled: returns the function and its arguments; see `wire.rpc.pickle_call`.
        """

    def read_weight(self, name: str) -> Any:
        """Return a copy of one of the model's `destinations`."""

    def close(self) -> None:
        """End the processes that compute for this one."""

    def submit(self, plan: StepPlan) -> Step:
        """Begin to execute a plan."""

    def compile_grammar(self, text: str) -> CompiledGrammar:
        """Compile a grammar, at once or on another thread."""

    def read_lora(self, directory: str) -> Any:
        """Read an adapter into the form that `submit` takes, which has a `digest`.

        Raises:
            EngineStartError: it cannot be read, or does not suit the model.
        """

    def make_lora(self, config: Any, tensors: Any) -> Any:
        """As `read_lora`, from the fields of adapter_config.json and the tensors of
        adapter_model.safetensors, which are copied."""

    def check_embeds(self, embeds: Any, length: int) -> Any:
        """Convert a prompt's embeddings, which must have `length` tokens, for `submit`.

        Raises:
            RequestError: their shape or dtype does not suit the model.
        """

    def check_item(self, item: Item) -> None:
        """Check that the model can encode an item.

        Raises:
            RequestError: its data or its number of embeddings are not those of its grid.
        """

    def keeps_state_of(self, row: int) -> bool:
        """Whether a custom logits processor keeps a state for a row's request, so that no tokens
        may be drafted for it."""

    def use_connector(self, connector: Any, name: str) -> None:
        """Call a KV connector around each step.

        Args:
            connector: a `plugins.kv_connector.KVConnector`.
            name: its name, for messages.

        Raises:
            EngineStartError: it does not take the blocks.
        """

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError if a custom logits processor refuses the parameters."""
