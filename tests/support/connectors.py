"""A KV connector whose tier is this process's memory, and that fails where a test wants it to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmllm.plugins.kv_connector import ConnectorContext, KVConnector, RequestView, StepView

METHODS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "request_finished",
)
fails_in = ""
"""The method that raises, or ""."""
blocks: dict[tuple[str, bytes], dict[str, Any]] = {}
"""By identity and hash the contents of each layer."""


def _may_fail(method: str) -> None:
    if fails_in == method:
        raise ValueError("broken")


class InMemory(KVConnector):
    """See above."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._computed: dict[str, int] = {}
        self._loads: list[tuple[int, bytes]] = []

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int, bool]:
        _may_fail("get_num_new_matched_tokens")
        first = end = num_computed_tokens // request.block_size
        self._computed[request.request_id] = first
        most = (request.num_tokens - 1) // request.block_size
        while end < most and (self.identity, request.block_hashes[end]) in blocks:
            end += 1
        return (end - first) * request.block_size, False

    def update_state_after_alloc(
        self, request: RequestView, blocks: Sequence[int], num_external_tokens: int
    ) -> None:
        _may_fail("update_state_after_alloc")
        first = self._computed.pop(request.request_id, 0)
        end = first + num_external_tokens // request.block_size
        self._loads += zip(blocks[first:end], request.block_hashes[first:end], strict=True)

    def build_connector_meta(self, plan: StepView) -> object:
        loads, self._loads = self._loads, []
        _may_fail("build_connector_meta")
        return loads, plan.complete

    def request_finished(
        self, request: RequestView, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        _may_fail("request_finished")
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, metadata: Any) -> None:
        _may_fail("start_load_kv")
        self._loading = metadata[0]

    def wait_for_layer_load(self, layer_name: str) -> None:
        _may_fail("wait_for_layer_load")
        for block_id, block_hash in self._loading:
            self._layers[layer_name][block_id] = blocks[self.identity, block_hash][layer_name]

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any) -> None:
        _may_fail("save_kv_layer")
        for block in metadata[1]:
            kept = blocks.setdefault((self.identity, block.block_hash), {})
            kept[layer_name] = kv_layer[block.block_id].clone()

    def wait_for_save(self) -> None:
        _may_fail("wait_for_save")
