"""Runs llama.cpp as a peer of `tools/compare.py`, through llama-cpp-python's low-level API.

All requests run together, each in a sequence with its own keys and values: a batch of the prefill
holds whole prompts, and each later batch one token of every request. The model is a GGUF file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from peer import Generate, serve

PREFILL_TOKENS = 256
"""The most tokens of a batch, unless one prompt is longer or there are more requests."""
KV_CACHE = "f16"
"""llama.cpp's default; its flash attention would round float32 to it."""

Array = np.ndarray[Any, np.dtype[Any]]


class Engine:
    """A model, and a context for the sizes of the last requests.

    Args:
        file: the GGUF file.
        kv_cache: the type of keys and values, such as "f16".
    """

    def __init__(self, file: str, kv_cache: str) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.api.llama_backend_init()
        params = self.api.llama_model_default_params()
        params.load_mode = self.api.LLAMA_LOAD_MODE_NONE  # read, not mapped
        self.model = self.api.llama_model_load_from_file(file.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        vocab = self.api.llama_model_get_vocab(self.model)
        self.vocab_size: int = self.api.llama_vocab_n_tokens(vocab)
        self.kv_type: int = getattr(self.api, f"GGML_TYPE_{kv_cache.upper()}")
        self.context: Any = None
        self.room = (0, 0)

    def make_room(self, num_requests: int, length: int) -> None:
        """Empties the context; makes a new one first unless it was made for these sizes.

        Args:
            num_requests: the number of requests that run together.
            length: the most tokens of a prompt and its output together.
        """
        if self.room != (num_requests, length):
            if self.context is not None:
                self.api.llama_free(self.context)
            params = self.api.llama_context_default_params()
            params.n_seq_max = num_requests
            params.n_ctx = num_requests * -(-length // 256) * 256
            params.n_batch = max(PREFILL_TOKENS, length, num_requests)
            params.n_ubatch = max(PREFILL_TOKENS, num_requests)
            params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
            params.type_k = params.type_v = self.kv_type
            params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            params.kv_unified = False
            self.context = self.api.llama_init_from_model(self.model, params)
            if not self.context:
                raise RuntimeError(f"llama.cpp has no room for {num_requests} x {length} tokens")
            self.room = num_requests, length
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def step(self, tokens: Array, positions: Array, requests: Array, last: Array) -> Array:
        """Computes one batch.

        Args:
            tokens: [tokens] int32.
            positions: [tokens] int32, in their requests.
            requests: [tokens] int32, the numbers of their requests.
            last: [tokens] int8, 1 for the tokens whose logits are wanted.

        Returns:
            The best next token after each token of `last`.
        """
        count = len(tokens)
        lengths = np.ones(count, np.int32)
        addresses = requests.ctypes.data + requests.itemsize * np.arange(count, dtype=np.uint64)
        batch = self.api.llama_batch(
            n_tokens=count,
            token=_pointer(tokens, ctypes.c_int32),
            pos=_pointer(positions, ctypes.c_int32),
            n_seq_id=_pointer(lengths, ctypes.c_int32),
            seq_id=_pointer(addresses, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(last, ctypes.c_int8),
        )
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        logits = self.api.llama_get_logits(self.context)
        shape = (int(last.sum()), self.vocab_size)
        best: Array = np.ctypeslib.as_array(logits, shape).argmax(1).astype(np.int32)
        return best


def _pointer(array: Array, kind: type[Any]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def batches(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Yields the numbers of the requests whose prompts are computed together."""
    batch: list[int] = []
    num_tokens = 0
    for request, prompt in enumerate(prompts):
        if batch and num_tokens + len(prompt) > PREFILL_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(request)
        num_tokens += len(prompt)
    yield batch


def prefill(engine: Engine, prompts: list[list[int]]) -> Array:
    """Computes all prompts; returns the first token of each output."""
    first = []
    for requests in batches(prompts):
        lengths = [len(prompts[request]) for request in requests]
        tokens = np.concatenate([np.array(prompts[request], np.int32) for request in requests])
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        last = np.zeros(len(tokens), np.int8)
        last[np.cumsum(lengths) - 1] = 1
        owners = np.repeat(np.array(requests, np.int32), lengths)
        first.append(engine.step(tokens, positions, owners, last))
    return np.concatenate(first)


def load(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import llama_cpp

    engine = Engine(model, KV_CACHE)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        engine.make_room(len(prompts), int(lengths.max()) + output_len)
        requests = np.arange(len(prompts), dtype=np.int32)
        every = np.ones(len(prompts), np.int8)
        outputs = [prefill(engine, prompts)]
        for num_done in range(output_len - 1):
            positions = lengths + np.int32(num_done)
            outputs.append(engine.step(outputs[-1], positions, requests, every))
        tokens: list[list[int]] = np.stack(outputs, 1).tolist()
        return tokens

    facts = {
        "version": llama_cpp.__version__,
        "weights": options["weights"],
        "kv_cache": KV_CACHE,
        "system": llama_cpp.llama_print_system_info().decode(),
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
