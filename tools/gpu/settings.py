"""The sizes of all measurements, on a GPU and in a rehearsal without one.

A rehearsal runs the same code with smaller sizes.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.families import FAMILIES, Family
from gpu.shapes import SHAPES, Shape


@dataclass(frozen=True)
class Settings:
    """The sizes of all measurements.

    Attributes:
        rehearsal: whether there is no GPU. The CPU then runs small models, and the figures mean
            nothing.
        device: the device of the engine and of the measurements.
        dtype: the dtype of the models.
        batches: the batch sizes of decodes, with the number of tokens that each request generates.
        context: the number of tokens in the prompts of decodes.
        prefill_tokens: the number of tokens in the prompt of the prefill, which is one step.
        prefill_rounds: how often the prefill is measured.
        compare_batches: the batch sizes of the comparison with transformers.
        compare_prompt: the number of tokens in the prompts of the comparison.
        compare_tokens: the number of tokens that each request of the comparison generates.
        ablation_batches: the batch sizes of the ablations, which are also the captured sizes.
        profiled_steps: the number of steps that torch's profiler records.
        copied_bytes: the size of the copy that measures the bandwidth, many times the size of the
            caches.
        product_size: the size of the large square product.
        num_launches: the number of launches whose time is measured.
        rounds: the number of repetitions of each measurement; the median counts.
        product_rows: the numbers of rows in the products of a decode step.
        packed_shapes: outputs and inputs of the products with packed weights.
        packed_rows: the numbers of rows in these products.
        attention_batches: the batch sizes of the attention of a decode step, at `context`.
        rotated_bytes: the size of the data that consecutive calls use in turn, so that no call
            finds its data in a cache.
        sampled_batches: the batch sizes of the loads that sample.
        sleep_rounds: how often sleep and wake-up, and a weight update, are measured.
        tile_heads: query heads and kv heads of the attention that is compared with torch's.
        tile_dims: the head sizes of that attention.
        tiles: its steps: requests, tokens of each, and context.
        deep_heads, deep_steps: the heads and the steps whose attention is measured with each of
            `stages`.
        stages: numbers of iterations whose loads are in flight.
        tiny_requests, tiny_prompt, tiny_tokens: the load of the tiny engine: requests, tokens of
            each prompt, and generated tokens.
        summed_rows: the numbers of rows of the sums of two ranks.
        most_kernels: the number of kernels that are compiled ahead, or of tests whose kernels are;
            None: all.
    """

    rehearsal: bool
    device: str
    dtype: str
    batches: dict[int, int]
    context: int
    prefill_tokens: int
    prefill_rounds: int
    compare_batches: tuple[int, ...]
    compare_prompt: int
    compare_tokens: int
    ablation_batches: tuple[int, ...]
    profiled_steps: int
    copied_bytes: int
    product_size: int
    num_launches: int
    rounds: int
    product_rows: tuple[int, ...]
    packed_shapes: tuple[tuple[int, int], ...]
    packed_rows: tuple[int, ...]
    attention_batches: tuple[int, ...]
    rotated_bytes: int
    sampled_batches: tuple[int, ...]
    sleep_rounds: int
    tile_heads: tuple[int, int]
    tile_dims: tuple[int, ...]
    tiles: tuple[tuple[int, int, int], ...]
    deep_heads: tuple[int, int]
    deep_steps: tuple[tuple[int, int, int], ...]
    stages: tuple[int, ...]
    tiny_requests: int
    tiny_prompt: int
    tiny_tokens: int
    summed_rows: tuple[int, ...]
    most_kernels: int | None

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def max_model_len(self) -> int:
        return max(self.prefill_tokens, self.context + max(self.batches.values())) + 64

    def shape(self, name: str) -> Shape:
        return SHAPES[name].shrunk() if self.rehearsal else SHAPES[name]

    def model(self, name: str) -> Shape | Family:
        """Returns a model of `SHAPES` or of `FAMILIES`."""
        if name in SHAPES:
            return self.shape(name)
        return FAMILIES[name].shrunk() if self.rehearsal else FAMILIES[name]

    def directory(self, name: str, model: Shape | Family | None = None) -> Path:
        """Writes a model directory into a new temporary directory; returns its path.

        Args:
            name: the name of the model.
            model: the model; None stands for that of the name.
        """
        parent = Path(tempfile.mkdtemp(prefix=f"gpu-check-{name}-"))
        return (model or self.model(name)).write(parent, self.dtype)

    def prompts(self, count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
        """Returns random token ids. The same arguments give the same ids, so that the engine and
        transformers get the same prompts."""
        draw = random.Random(f"{seed} {count} {length} {vocab}")
        return [draw.choices(range(vocab), k=length) for _ in range(count)]

    @property
    def few_batches(self) -> list[int]:
        """The batch sizes of the decodes of `FAMILIES`: one request and a few."""
        return sorted(self.batches)[:2]

    def engine_options(self, name: str | None = None) -> dict[str, Any]:
        """Returns the options of `LLM` for all engines, or for that of a model, without chunked
        prefill of one prompt and without prefix caching."""
        batches = self.few_batches if name in FAMILIES else self.batches
        return {
            "device": self.device,
            "dtype": self.dtype,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": self.prefill_tokens,
            "generation_config": "shmllm",
            "startup_timeout": 300.0,
            **({"kv_cache_memory_bytes": 2**24} if self.rehearsal else {}),
        }


REAL = Settings(
    rehearsal=False,
    device="cuda",
    dtype="bfloat16",
    batches={1: 128, 8: 96, 64: 96, 256: 112},
    context=1024,
    prefill_tokens=8192,
    prefill_rounds=5,
    compare_batches=(1, 64),
    compare_prompt=128,
    compare_tokens=64,
    ablation_batches=(1, 256),
    profiled_steps=24,
    copied_bytes=2**32,
    product_size=8192,
    num_launches=2000,
    rounds=20,
    product_rows=(1, 2, 4, 8, 16, 64, 256),
    packed_shapes=((8192, 2048), (28_672, 4096)),
    packed_rows=(1, 16, 64),
    attention_batches=(1, 8, 64, 256),
    rotated_bytes=2**29,
    sampled_batches=(1, 256),
    sleep_rounds=3,
    tile_heads=(8, 2),
    tile_dims=(64, 128),
    # Decodes with split and with whole contexts, prompts, and the last chunk of a long prompt.
    tiles=((2, 1, 8192), (200, 1, 1024), (1, 1024, 1024), (1, 8192, 8192), (1, 512, 8192)),
    deep_heads=(32, 8),
    deep_steps=((64, 1, 1024), (1, 4096, 4096)),
    stages=(3, 5),
    tiny_requests=3,
    tiny_prompt=12,
    tiny_tokens=8,
    summed_rows=(1, 16, 128, 1024, 8192),
    most_kernels=None,
)
REHEARSAL = Settings(
    rehearsal=True,
    device="cpu",
    dtype="float32",
    batches={1: 64, 2: 64, 3: 64},
    context=32,
    prefill_tokens=256,
    prefill_rounds=2,
    compare_batches=(1, 2),
    compare_prompt=16,
    compare_tokens=8,
    ablation_batches=(1, 3),
    profiled_steps=4,
    copied_bytes=2**20,
    product_size=64,
    num_launches=20,
    rounds=1,
    product_rows=(1, 2),
    packed_shapes=((40, 256),),
    packed_rows=(1, 2),
    attention_batches=(1,),
    rotated_bytes=2**14,
    sampled_batches=(1, 2),
    sleep_rounds=2,
    tile_heads=(4, 2),
    tile_dims=(16,),
    tiles=((2, 1, 40), (1, 20, 20), (1, 5, 40)),
    deep_heads=(4, 2),
    deep_steps=((2, 1, 40),),
    stages=(3, 5),
    tiny_requests=2,
    tiny_prompt=5,
    tiny_tokens=2,
    summed_rows=(1, 3),
    most_kernels=2,
)


def settings_for(rehearsal: bool) -> Settings:
    return REHEARSAL if rehearsal else REAL
