"""A KV connector that keeps blocks in a directory: a new engine finds the prompts of an old one.

python examples/disk_connector.py [DIRECTORY]

Each block is a file, named by its hash, with a checksum in front. What is damaged or missing is
computed again. docs/plugins.md describes the interface.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

from shmllm import LLM, SamplingParams
from shmllm.plugins.kv_connector import ConnectorContext, FullBlock, KVConnector


class DiskConnector(KVConnector):
    """`kv_connector_extra_config` is {"path": a directory}."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._root = Path(context.extra_config["path"])
        self._found: dict[str, tuple[int, list[bytes]]] = {}
        self._loads: list[tuple[int, bytes]] = []
        self.use_identity(context.identity)

    def use_identity(self, identity: str) -> None:
        super().use_identity(identity)
        self._directory = self._root / identity
        self._directory.mkdir(parents=True, exist_ok=True)

    # The scheduler's half: which blocks are there, and which ones a step loads and saves.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = num_computed_tokens // request.block_size
        most = (request.num_tokens - 1) // request.block_size  # the last token is computed
        wanted = request.block_hashes[first:most]
        found = list(itertools.takewhile(bool, map(self._read, wanted)))
        self._found[request.request_id] = first, found
        return len(found) * request.block_size, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        first, found = self._found.pop(request.request_id, (0, []))
        count = num_external_tokens // request.block_size  # 0 if others have computed them since
        self._loads += zip(blocks[first:], found[:count], strict=False)

    def build_connector_meta(self, plan):
        loads, self._loads = self._loads, []
        return loads, plan.complete

    def request_finished(self, request, block_ids):
        self._found.pop(request.request_id, None)
        return False, None

    def _read(self, block_hash: bytes) -> bytes:
        """The contents of a block; empty if its file is missing or damaged."""
        try:
            text = (self._directory / block_hash.hex()).read_bytes()
        except OSError:
            return b""
        digest, contents = text[:32], text[32:]  # the bytes of a SHA-256
        return contents if sha256(contents).digest() == digest else b""

    # The worker's half: the same bytes in all layers' tensors.

    def register_kv_caches(self, kv_caches):
        self._layers = kv_caches

    def start_load_kv(self, metadata):
        for block_id, contents in metadata[0]:
            parts = torch.frombuffer(bytearray(contents), dtype=torch.uint8)
            sizes = [layer.shape[1] for layer in self._layers.values()]
            for layer, part in zip(self._layers.values(), parts.split(sizes), strict=True):
                layer[block_id] = part

    def wait_for_layer_load(self, layer_name):
        pass  # everything is there

    def save_kv_layer(self, layer_name, kv_layer, metadata):
        if layer_name == next(iter(self._layers)):  # a file has all layers
            for block in metadata[1]:
                self._write(block)

    def wait_for_save(self):
        pass  # everything is written

    def _write(self, block: FullBlock) -> None:
        path = self._directory / block.block_hash.hex()
        if not path.exists():
            parts = [layer[block.block_id] for layer in self._layers.values()]
            contents = torch.cat(parts).numpy().tobytes()
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(sha256(contents).digest() + contents)
            unfinished.rename(path)  # others see all of it or nothing


def main(directory: str) -> None:
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 8
    for name in ("the first engine", "the second engine"):
        with LLM(
            "tiny",
            kv_connector="disk_connector:DiskConnector",
            kv_connector_extra_config={"path": directory},
        ) as llm:
            (output,) = llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)
        tokens = len(output.prompt_token_ids)
        print(f"{name}: {output.num_cached_tokens} of {tokens} tokens came from the directory")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if sys.argv[1:] else temporary)
