"""How much is measured, and on what: on a GPU, or as a rehearsal without one.

Owns the two sets of sizes. A rehearsal takes the same ways through all modules.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.shapes import SHAPES, Shape


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        rehearsal: there is no GPU: the CPU computes, small things, and no figure means anything.
        batches: of decodes; for each how many tokens a request generates.
        context: tokens of the prompts of decodes.
        prefill_tokens: of the prompt whose computation is timed, in one step.
        prefill_rounds: how often.
        compare_batches: beside transformers.
        compare_prompt: tokens of its prompts.
        compare_tokens: tokens that each of its requests generates.
        ablation_batches: with graphs and overlapping switched off; each is also captured.
        profiled_steps: that torch's profiler records.
        copied_bytes: by which bandwidth is measured: many times what caches hold.
        product_size: of the large square product.
        num_launches: by which launches are timed.
        rounds: of each timing; the median counts.
        product_rows: of the products of a decode step.
        attention_batches: of the attention of a decode step, at `context`.
        rotated_bytes: that calls in turn touch, so that none finds its data in a cache.
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
    attention_batches: tuple[int, ...]
    rotated_bytes: int

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def max_model_len(self) -> int:
        return max(self.prefill_tokens, self.context + max(self.batches.values())) + 64

    def shape(self, name: str) -> Shape:
        return SHAPES[name].shrunk() if self.rehearsal else SHAPES[name]

    def directory(self, name: str) -> Path:
        """The directory of a model, in a new temporary one."""
        parent = Path(tempfile.mkdtemp(prefix=f"gpu-check-{name}-"))
        return self.shape(name).write(parent, self.dtype)

    def prompts(self, count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
        """Random token ids, the same for the same numbers, so that others can be given them."""
        draw = random.Random(f"{seed} {count} {length} {vocab}")
        return [draw.choices(range(vocab), k=length) for _ in range(count)]

    def engine_options(self) -> dict[str, Any]:
        """Of `LLM`, for all engines. Prompts are computed whole, and nothing is found cached."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(self.batches),
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
    profiled_steps=8,
    copied_bytes=2**32,
    product_size=8192,
    num_launches=2000,
    rounds=20,
    product_rows=(1, 2, 4, 8, 16, 64, 256),
    attention_batches=(1, 8, 64, 256),
    rotated_bytes=2**29,
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
    profiled_steps=3,
    copied_bytes=2**20,
    product_size=64,
    num_launches=20,
    rounds=1,
    product_rows=(1, 2),
    attention_batches=(2,),
    rotated_bytes=2**14,
)


def settings_for(rehearsal: bool) -> Settings:
    return REHEARSAL if rehearsal else REAL
