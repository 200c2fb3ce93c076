"""Compiles every launch of the Triton kernels for a GPU that the machine need not have.

The command `python kernel_launches.py CAPABILITY [all]` prints one JSON line for each kernel.
Compiling needs the compute capability only. It finds errors that the interpreter cannot: types that
change in a loop, registers that spill, shared memory that does not fit, and arithmetic that became
float64.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from shmllm_kernels.gpu import activation, configs, norm
from shmllm_kernels.gpu.attention import AttentionScratch, paged_attention
from shmllm_kernels.gpu.logits_processors import add_biases, count_tokens
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.gpu.sampling import SamplingScratch, TokenMasks, sample
from shmllm_kernels.gpu.scoring import Scores, score
from shmllm_kernels.gpu.step import embed, gather_rows, rope_tables, unpack_step
from shmllm_kernels.reference.sampling import SamplingColumns
from shmllm_kernels.reference.step import StepSizes, StepTensors

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
VOCAB_SIZE = 128_256


class AbsentDevice:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def report(name: str, kernel: Any) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    ptx = kernel.asm["ptx"]
    line = {
        "kernel": name,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma"),
        "mma": ptx.count("mma.sync"),
        "async_copies": ptx.count("cp.async.cg"),
        "is_double": ".f64" in ptx,
    }
    print(json.dumps(line), flush=True)


def compile_instead_of_launching(capability: int, label: list[str]) -> None:
    """Make all launches compile only, and report each kernel with `label[0]` before its name."""
    driver.set_active(AbsentDevice(capability))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        report(f"{label[0]}{self.fn.__name__}", kernel)
        return kernel

    JITFunction.run = compile_only


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows() -> None:
    x, gate_up = empty(4, 4096), empty(4, 2 * 14_336)
    norm.rms_norm(x, x, x[0], 1e-5)
    norm.add_rms_norm(x, x, x.clone(), x[0], 1e-5)
    activation.silu_and_mul(empty(4, 14_336), gate_up)
    cache, angles = empty(2, 8, 16, 8, 128), empty(4, 1, 128)
    slots = empty(4, dtype=torch.int64)
    for norms in (None, (angles[0, 0], angles[0, 0], 1e-6)):
        heads = empty(4, 48, 128)
        rope_and_write(empty(4, 32, 128), cache[0], cache[1], heads, angles, angles, slots, norms)


def step() -> None:
    ids, x = empty(4, dtype=torch.int64), empty(4, 4096)
    embed(x, x.clone(), ids, ids)
    gather_rows(x, x.clone(), ids)
    rope_tables(empty(4, 128), empty(4, 128), ids, empty(64, dtype=torch.float32), 1.0)
    sizes = StepSizes(4, 2, 2)
    packed = empty(3 * sum(sizes), dtype=torch.int64)
    unpack_step(StepTensors.allocate(sizes, "cpu"), packed, sizes, sizes)


def sampler() -> None:
    ids, tokens = empty(4, dtype=torch.int32), empty(4, dtype=torch.int64)
    logits = empty(4, VOCAB_SIZE, dtype=torch.float32)
    scratch = SamplingScratch.allocate(4, VOCAB_SIZE, "cpu")
    columns = SamplingColumns.greedy(4, "cpu")
    counts = empty(4, VOCAB_SIZE, dtype=torch.int32)
    masks = TokenMasks(empty(4, VOCAB_SIZE // 32, dtype=torch.int32), ids)
    sample(tokens, logits, ids, tokens, columns, scratch)
    sample(tokens, logits.bfloat16(), ids, tokens, columns, scratch, counts, masks, True)
    score(Scores.allocate(4, 20, "cpu"), logits, tokens, ids, scratch)
    count_tokens(counts, ids, tokens)
    count_tokens(counts, ids, tokens, is_prompt=True)
    add_biases(logits, ids, tokens, logits[0, :4])


SHAPES = ((32, 8, 128), (32, 8, 64), (16, 8, 256), (28, 4, 128), (32, 8, 80))
"""Query heads, kv heads, and the head size."""
OPTIONS = ((4, None), (1, 1024), (1, None))
"""Splits and window."""


def attention(
    label: list[str], dtype: torch.dtype, shapes: Sequence[Any], options: Sequence[Any]
) -> None:
    for heads, kv_heads, dim in shapes:
        for max_query_len in (1, 512):
            device = torch.device("cuda", 0)
            config = configs.attention_config(device, dim, heads // kv_heads, max_query_len, dtype)
            for splits, window in options:
                label[0] = f"{dtype} {heads}/{kv_heads}x{dim} {max_query_len} {window} "
                cache = empty(2, 8, 16, kv_heads, dim, dtype=dtype)
                query = empty(4, heads, dim, dtype=dtype)
                table, starts = empty(2, 8, dtype=torch.int32), empty(3, dtype=torch.int32)
                scratch = AttentionScratch.allocate(4, heads, splits, dim, torch.device("cpu"))
                paged_attention(
                    query.clone(), query, cache[0], cache[1], table, starts, starts[1:], config,
                    0.1, window, splits, scratch,
                )  # fmt: skip


def main() -> None:
    capability, label = int(sys.argv[1]), [""]
    compile_instead_of_launching(capability, label)
    found = capability // 10, capability % 10
    configs._capability = lambda index: found  # type: ignore[assignment]
    rows()
    step()
    sampler()
    if sys.argv[2:] == ["all"]:
        for dtype in (torch.bfloat16, torch.float16):
            attention(label, dtype, SHAPES, OPTIONS)
        attention(label, torch.float32, SHAPES[:2], OPTIONS[:2])
    else:
        attention(label, torch.bfloat16, SHAPES[:1], OPTIONS[:2])


if __name__ == "__main__":
    main()
