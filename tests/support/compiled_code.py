"""Reads facts from the code of a compiled Triton kernel: its GPU dialect, PTX and machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def facts_of(kernel: Any) -> dict[str, Any]:
    """Return the facts of a compiled kernel that `kernel_facts` checks."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dump(what: str) -> str:
            command = [str(CUOBJDUMP), what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = dump("--dump-resource-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        code = dump("--dump-sass") if int(found[2]) else ""
    ptx = kernel.asm["ptx"]
    return {
        "threads": 32 * kernel.metadata.num_warps,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "spills_in_loops": spills_in_loops(code),
        "spills_in_products": spills_in_products(code),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        # Sums that pass between registers and the tensor cores' memory: once around a loop.
        "sums_stored": ptx.count("tcgen05.st"),
        "loops": pipelines(kernel.asm["ttgir"]),
        "waits": waits_in_loops(ptx),
        "is_double": ".f64" in ptx,
        # Products of bfloat16 are such operations, too, which add nothing.
        "contractions": len(re.findall(r"fma\.rn(?:\.ftz)?\.f32", ptx)),
        "releases": ptx.count("atom.global.sys.release"),
        "to_float8": len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", ptx)),
        "from_float8": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "slow_conversions": ptx.count("cvt.bf16.f16") + ptx.count("cvt.rn.bf16.f16"),
        "byte_loads": len(re.findall(r"ld\.shared\.[bsu]8\b", ptx)),
        "acquires": ptx.count("ld.global.sys.acquire"),
        "wide_loads": ptx.count("ld.global.v4"),
        "tile_loads": ptx.count("cp.async.bulk.tensor"),
        "early_loads": early_loads(ptx),
        "cache_requests": ptx.count("cp.async.bulk.prefetch.L2"),
        "requests_after_wait": ptx.rpartition("griddepcontrol.wait")[2].count("bulk.prefetch"),
        "meetings": meetings(ptx),
        "loads_before_wait": ptx.rpartition("griddepcontrol.wait")[0].count("ld.global"),
        "is_followed_early": "launch_dependents" in ptx.rpartition("griddepcontrol.wait")[0],
    }


def pipelines(ttgir: str) -> list[dict[str, list[int]]]:
    """Return how each loop with matrix products is pipelined, from Triton's GPU dialect.

    Returns:
        For each loop, in order:
        buffers: the number of buffers of each matrix that the loop copies to shared memory.
        waits: for each wait in the loop, the number of groups of copies that may be in flight.
    """
    lines = ttgir.splitlines()
    allocated = r"(%\w+) = ttg\.local_alloc : .*memdesc<(\d+)x(?:\d+x)?\d+x\d+x(?:bf16|f16|f32|i8)"
    depths = {name: int(depth) for name, depth in re.findall(allocated, ttgir)}
    found = []
    for begin, line in enumerate(lines):
        if " scf.for " not in line:
            continue
        indent = line[: len(line) - len(line.lstrip())]
        end = next(n for n in range(begin, len(lines)) if lines[n].startswith(indent + "}"))
        body = "\n".join(lines[begin:end])
        if not re.search(r"(tt\.|_)dot |_mma ", body):
            continue
        used = set(re.findall(r"ttg\.memdesc_index (%\w+)", body))
        found.append(
            {
                "buffers": [depths[name] for name in depths if name in used],
                "waits": [int(num) for num in re.findall(r"async_wait .*num = (\d+)", body)],
            }
        )
    return found


def waits_in_loops(ptx: str) -> list[list[int]]:
    """Return for each loop with matrix products the operands of `cp.async.wait_group`, from PTX. A
    loop is the code between a label and the last later branch to it."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: n for n, line in enumerate(lines) if line.startswith("$L")}
    last: dict[str, int] = {}
    for end, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if target is not None and labels[target[1]] <= end:
            last[target[1]] = end
    found = []
    for label, end in last.items():
        body = "\n".join(lines[labels[label] : end])
        if re.search(r"\b(wgmma|tcgen05|mma)\.(mma|sync)", body):
            found.append([int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", body)])
    return found


def spills_in_loops(sass: str) -> int:
    """Return how many instructions in loops store or load spilled registers, from machine code."""
    return len(set().union(*(spills(body) for body in machine_loops(sass))))


def spills_in_products(sass: str) -> int:
    """Return how many of them are in loops that multiply matrices, from machine code. Of loops that
    share instructions the shortest counts: others contain it, or are the way back from code that
    the assembler has put elsewhere."""
    products = sorted(filter(has_products, machine_loops(sass)), key=len)
    inner: list[dict[int, str]] = []
    for body in products:
        if not any(body.keys() & other.keys() for other in inner):
            inner.append(body)
    return len(set().union(*map(spills, inner)))


def machine_loops(sass: str) -> list[dict[int, str]]:
    """Return the instructions of each loop by their addresses: the code between an address and a
    later branch to it."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    code = [(int(address, 16), instruction) for address, instruction in lines]
    found = []
    for end, instruction in code:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", instruction)
        if target is not None:
            body = {at: each for at, each in code if int(target[1], 16) <= at < end}
            found.append(body)
    return found


def has_products(body: dict[int, str]) -> bool:
    return any(re.search(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", each) for each in body.values())


def spills(body: dict[int, str]) -> set[int]:
    """Return the addresses of instructions that store or load spilled registers."""
    return {at for at, each in body.items() if re.search(r"\b(STL|LDL)\b", each)}


def meetings(ptx: str) -> list[int]:
    """Return for each wait of programs for each other how many loads of 16 bytes a program has
    issued since it told the others that it has written its results."""
    found, loads = [], 0
    for line in ptx.splitlines():
        if "ld.global.v4" in line:
            loads += 1
        elif "atom.global.gpu.release" in line:
            loads = 0
        elif "ld.global.gpu.acquire" in line:
            found.append(loads)
    return found


def early_loads(ptx: str) -> int | None:
    """Return how many loads of 16 bytes a dependent launch issues before it waits for the launch
    before; None: it is none."""
    before, wait, _ = ptx.rpartition("griddepcontrol.wait")  # the others are those of no work
    return before.count("ld.global.v4") if wait else None
