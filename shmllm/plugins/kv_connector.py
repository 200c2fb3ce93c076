"""The interface of KV connectors: another tier of KV blocks, such as a disk or a server.

The names and the meaning of the methods are vLLM's. A connector is one object in the engine's
process and has two halves. The scheduler asks its first half what can be loaded for a request, and
lets it describe each step; the worker calls its second half around the computation of the step that
was described. If steps overlap (`async_scheduling`), the second half runs on another thread, and
the first half may already describe the next step meanwhile: what the two share is the metadata.

Contents of blocks are opaque bytes: a block that was saved by an engine with the same `identity`
can be loaded into any block of another one, and the results have the same bits. Tensors are
torch's. This module must not know who calls a connector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shmllm.plugins.qualified_names import in_one_line


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made with.

    Attributes:
        extra_config: the option `kv_connector_extra_config`.
        role: "kv_both", "kv_producer" (nothing is loaded) or "kv_consumer" (nothing is saved).
        identity: hexadecimal digits, equal for engines whose blocks have the same bytes: a hash of
            the weights, the model, its dtypes and its kernels. Names what is stored.
        block_size: the number of tokens in a block.
    """

    extra_config: Mapping[str, Any]
    role: str
    identity: str
    block_size: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a connector sees it, at the moment of a call.

    Attributes:
        client: the number of its front end.
        number: the front end's number for it.
        token_ids: its tokens so far, first the prompt, then the output. Not to be changed.
        num_prompt_tokens: how many of them are the prompt.
        block_hashes: a hash for each full block of these tokens. It covers all tokens from the
            first one on, the cache salt, embeddings and the adapter.
        block_size: the number of tokens in a block.
    """

    client: int
    number: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_hashes: tuple[bytes, ...]
    block_size: int

    @property
    def request_id(self) -> str:
        """Identifies the request among those that have not ended."""
        return f"{self.client}-{self.number}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class FullBlock(NamedTuple):
    """A block whose contents are complete.

    block_id: its index in the tensors.
    block_hash: identifies its contents; see `RequestView.block_hashes`.
    """

    block_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request that takes part in a step.

    Attributes:
        request: the request.
        block_ids: its blocks, by position.
        start: the position of the first token that the step computes for it.
        count: how many tokens the step computes for it.
    """

    request: RequestView
    block_ids: Sequence[int]
    start: int
    count: int


class StepView:
    """A step as a connector sees it.

    Args:
        step: the number of the step.
        complete: see below.
        schedule: makes the value of `scheduled`.

    Attributes:
        step: the number of the step.
        complete: the blocks that can be saved after the step: they are full, and the engine has no
            other block with this hash. A later step may overwrite them. Blocks that the connector
            itself loads are not among them.
    """

    def __init__(
        self,
        step: int,
        complete: Sequence[FullBlock],
        schedule: Callable[[], list[ScheduledRequest]],
    ) -> None:
        self.step = step
        self.complete = complete
        self._schedule = schedule

    @cached_property
    def scheduled(self) -> list[ScheduledRequest]:
        """The requests of the step. To be read while `build_connector_meta` runs."""
        return self._schedule()


def failure_of(name: str, method: str, problem: BaseException) -> str:
    """A sentence about an exception of a connector's method."""
    return f"the KV connector {name} failed in {method}: {in_one_line(problem)}"


class KVConnector(ABC):
    """Loads and saves KV blocks. docs/plugins.md says when each method is called, and what happens
    if it raises.

    Attributes:
        context: see `ConnectorContext`.
        identity: as in the context, or what `use_identity` was called with since.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context
        self.identity = context.identity

    # The scheduler's half.

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens can be loaded behind those that the engine has, without any effect
        on the connector's state: it may be called several times before the request is admitted.

        Args:
            request: the request.
            num_computed_tokens: the tokens of which the engine has the blocks, a multiple of the
                block size.

        Returns:
            The number, a multiple of the block size that leaves at least the last token to compute;
            and False: the step that computes the request's next token loads them. vLLM's True,
            loading between steps, is an error.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, blocks: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request is admitted, for the first time or after a preemption.

        Args:
            request: the request.
            blocks: the ids of all its blocks, by position.
            num_external_tokens: how many tokens have to be loaded; 0: none.
        """

    @abstractmethod
    def build_connector_meta(self, plan: StepView) -> object:
        """Describe a step for the worker's half. What was noted for it by
        `update_state_after_alloc` belongs to this step."""

    def request_finished(
        self, request: RequestView, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, for whatever reason; its blocks, if it has any, are about to be
        freed.

        Returns:
            False and None. vLLM's True, which keeps the blocks, and parameters for the outputs are
            not possible here, and reported as an error.
        """
        return False, None

    def use_identity(self, identity: str) -> None:
        """The engine has read other weights: from the next step on, blocks have this identity."""
        self.identity = identity

    # The worker's half.

    @abstractmethod
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's blocks, once, before the first step.

        Args:
            kv_caches: for each layer with keys and values its blocks, (number of blocks, bytes of a
                block) uint8, in the host's memory; rows need not be adjacent.
        """

    @abstractmethod
    def start_load_kv(self, metadata: Any) -> None:
        """Begin to write the blocks that a step loads. Only called for steps that load any."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the step's blocks of a layer are written. Called for each layer, before the
        step computes."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any) -> None:
        """Begin to save the step's complete blocks of a layer. Called for each layer when the step
        has computed, if there are any.

        Args:
            layer_name: the layer.
            kv_layer: its tensor; see `register_kv_caches`.
            metadata: what `build_connector_meta` returned for the step.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the step's complete blocks have been read: the next step may overwrite
        them."""

    def reset_cache(self) -> None:  # noqa: B027 - few connectors need it
        """Forget what was stored: `reset_prefix_cache(reset_connector=True)` asks for it."""

    def shutdown(self) -> None:  # noqa: B027 - few connectors need it
        """The engine ends. No other method is called afterwards."""
