"""What compiled kernels must be like: registers, shared memory, stack, tensor cores, loads ahead.

`FACTS` has a line for each kernel that is launched, and `check` compares a launch that
`kernel_launches` has compiled with it, and with what its kind of loop must show. A new kernel needs
a line in FACTS and a launch in `kernel_launches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm_kernels.gpu import (
    convolution,
    few_delta_net,
    few_mamba_inputs,
    few_mamba_scan,
    latent_heads,
    mamba2,
)

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The shared memory of a multiprocessor. The table for 8.0 is that for 8.6, 8.9 and 12.0, too."""
SYSTEM_BYTES = 1024
"""The shared memory that each program takes in addition."""
REGISTERS = 65_536
"""The registers of a multiprocessor."""
THREADS, PROGRAMS = 2048, 32
"""The most threads and programs of a multiprocessor of 8.0, 9.0 and 10.0."""
SPILLED_BYTES = 64
"""The stack bytes of a few registers that a long prologue spills; a loop that spills needs more.
Attention keeps some of those in memory that it needs behind its loops."""
ONE_PROGRAM_BEYOND = 256
"""Of wider heads, two buffers for keys and values leave no room for a second program but on 9.0."""
GROUPS_PER_TILE = 3
"""The table's entries, the keys and the values of a tile are copied as one group each."""
LEAST_STAGES = 5
"""With fewer stages, a program of attention waits for its own loads."""
LOADED = 8
"""The elements of bfloat16 in a load of 16 bytes."""
WIDE_ROWS = 64
"""The least rows of a tile for wgmma (9.0) and tcgen05 (10.0). Smaller ones use mma.sync."""

Kernel = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What every launch of a kernel in 16-bit dtypes must show.

    Attributes:
        threads: the least threads that a multiprocessor holds, by registers and shared memory. With
            a load of 16 bytes each, 1024 of them keep 16 KiB in flight, and a few loads each reach
            the 48 KiB that hide the latency of memory (`configs`).
        stack_bytes: the most stack bytes.
        multiplies: whether it uses tensor cores.
    """

    threads: int
    stack_bytes: int = 0
    multiplies: bool = False


ROWS = Facts(1024)
"""Kernels that read rows once: many threads keep many loads in flight."""
KEPT = Facts(512)
"""Kernels that keep a chunk of a row, or a state, in registers, with several loads a thread."""
TILES = Facts(128, multiplies=True)
"""Products: a program keeps loads of later iterations in flight by itself."""

FACTS = {
    "activation._activate": ROWS,
    "activation._activate_sparse": KEPT,
    "altup._correct": ROWS,
    "altup._match_magnitude": ROWS,
    "altup._predict": ROWS,
    "attention_kernels.attend": Facts(128, 256, multiplies=True),
    "attention_kernels.merge_splits": ROWS,
    "chunk_summaries.summarise_chunks": KEPT,
    "compression._compress": KEPT,
    "connections._fold": ROWS,
    "connections._multiply": KEPT,
    "connections._spread": ROWS,
    "combined_row_kernel.combine_packed_row": Facts(256, SPILLED_BYTES),
    "combined_row_kernel.combine_single_row": Facts(256, 8),
    "convolution._convolve": ROWS,
    # One program of all layers on a multiprocessor; it keeps a few addresses in memory meanwhile.
    "decoder_kernel.decode_layers": Facts(256, 3 * SPILLED_BYTES, multiplies=True),
    "decode_attention_kernel.attend_decodes": Facts(128, SPILLED_BYTES, multiplies=True),
    "delta_net._delta_rule": KEPT,
    "delta_net._gated_norm": ROWS,
    "expert_lora._shrink_pairs": TILES,
    "expert_sums._combine": ROWS,
    "experts_kernel.multiply_down": TILES,
    "experts_kernel.multiply_gate_and_up": TILES,
    "experts_kernel.multiply_up": TILES,
    "few_delta_net._run_delta_net": Facts(256),
    "few_mamba_inputs._project_inputs": Facts(384, multiplies=True),
    "few_mamba_scan._scan_inputs": Facts(256, multiplies=True),
    "few_mamba2._run_mamba2": Facts(256),
    "few_routing._route_rows": Facts(256, 32),  # before its loops, of more than 256 experts
    "group._meet": Facts(32),
    "group._sum_parts": ROWS,
    "identities._take_identities": ROWS,
    "block_indexer._choose_blocks": KEPT,
    "block_indexer._score_index_blocks": TILES,
    "indexer._choose_tokens": KEPT,
    "indexer._score_index_keys": TILES,
    "indexer._store_index_keys": KEPT,
    "last_rotated._rotate_heads": ROWS,
    "last_rotated._store_keys": ROWS,
    "last_rotated._store_rows": ROWS,
    "latent_attention.attend_latents": TILES,
    "latent_heads._absorb_queries": KEPT,
    "latent_heads._project_values": KEPT,
    "latent_write._write_latents": ROWS,
    "left_out._leave_out": ROWS,
    "listed_keys._list_keys": KEPT,
    "logits_processors._add": ROWS,
    "logits_processors._count": ROWS,
    "lora._expand": TILES,
    "lora._shrink": TILES,
    "mamba._normalise": ROWS,
    "mamba._selective_scan": Facts(256),
    "mamba2._gated_norm": ROWS,
    "mamba2._scan": KEPT,
    "few_rows_kernel.multiply_few_rows": Facts(256, 8, multiplies=True),
    # Where the parts of others are added, not in the loop of products: see `check_many_rows`.
    "many_rows_kernel.multiply_many_rows": Facts(256, 3 * SPILLED_BYTES, multiplies=True),
    "norm._add_normed": ROWS,
    "norm._layer_norm": ROWS,
    "norm._rms_norm": ROWS,
    "packed_row_kernel.multiply_packed_row": Facts(256, SPILLED_BYTES),
    "pairs._sort_pairs": ROWS,
    "per_layer._embed": ROWS,
    "per_layer._gate": ROWS,
    "products._linear": TILES,
    "relations._relate": KEPT,
    "rope_write._rope_write": ROWS,
    "routing._route": Facts(256, 128),  # before its loops, with 256 experts in groups
    "routing_by_token._route_by_token": ROWS,
    "row_copies._copy_rows": ROWS,
    "row_copies._unpack_rows": ROWS,
    "scoring._rank_chunks": ROWS,
    "scoring._top_scores": KEPT,
    "single_row_kernel.multiply_single_row": Facts(256),
    "short_convolution._short_convolution": KEPT,
    "step._rope_tables": ROWS,
    "step._unpack_step": KEPT,
    "threshold_search.narrow_interval": Facts(512, SPILLED_BYTES),
    "token_choice.choose_tokens": KEPT,
    "token_choice.draw_chunks": KEPT,
    "token_choice.mask_dropped": ROWS,
    "top_candidates.collect_candidates": ROWS,
    "top_candidates.count_by_distance": KEPT,
    "xielu._xielu": ROWS,
}
"""All launched kernels, as "module.function"."""

KEPT_BYTES = {
    "few_delta_net": 4 * few_delta_net.MOST_CELLS,
    "few_mamba_inputs": 2 * few_mamba_inputs.ROWS * few_mamba_inputs.COLUMNS,
    "few_mamba_scan": 2 * few_mamba_scan.WEIGHTS,
    "few_mamba2": 4 * mamba2.COLUMNS * 128,
    "latent_heads": 2 * latent_heads.WEIGHTS,
    "short_convolution": 4 * 2 * convolution.CHANNELS,
}
"""By module: the bytes of the weights, or of the state, that a program keeps in registers."""

PIPELINED = ("multiply_gate_and_up", "multiply_up", "multiply_down", "_linear")
"""Products whose loop has as many iterations as rows have tiles, so that it must load ahead."""


def name_of(kernel: Kernel) -> str:
    return f"{kernel['module']}.{kernel['kernel']}"


def resident_threads(kernel: Kernel, capability: int) -> int:
    """Return how many threads of a kernel a multiprocessor holds at once."""
    threads: int = kernel["threads"]
    by_registers: int = REGISTERS // (kernel["registers"] * threads)
    by_shared: int = (SHARED_BYTES[capability] + SYSTEM_BYTES) // (
        kernel["shared_bytes"] + SYSTEM_BYTES
    )
    return threads * min(by_registers, by_shared, THREADS // threads, PROGRAMS)


def check(found: list[Kernel], capability: int) -> None:
    """Compare launches with `FACTS`, and the loops of products and attention with their kinds."""
    for kernel in found:
        print(kernel)
        facts = FACTS[name_of(kernel)]
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability]
        assert not kernel["is_double"]
        if kernel.get("dtype") == "torch.float32":
            continue
        assert resident_threads(kernel, capability) >= facts.threads
        assert kernel["stack_bytes"] <= stack_allowed(kernel, facts)
        assert kernel["spills_in_loops"] <= spills_allowed(kernel, capability)
        check_instruction(kernel, facts, capability)
        if kernel["kernel"] == "attend":
            check_attention(kernel, capability)
        elif kernel["kernel"] == "attend_latents":
            check_latents(kernel)
        elif kernel["module"] in KEPT_BYTES:
            check_early_loads(kernel)
        elif "kind" in kernel:
            check_packed(kernel)
        elif kernel["kernel"] in PIPELINED:
            check_products(kernel)


def stack_allowed(kernel: Kernel, facts: Facts) -> int:
    """Return how many bytes a thread may keep in memory. Prompts' programs of latent attention to
    FP8 keep a few registers there that they need behind their loops, as other attention does;
    products of some packed weights keep up to four."""
    if kernel["kernel"] == "attend_latents" and kernel["has_float8"]:
        return SPILLED_BYTES
    is_packed_product = kernel["kernel"] in PIPELINED and "kind" in kernel
    return max(facts.stack_bytes, 16 if is_packed_product else 0)


def spills_allowed(kernel: Kernel, capability: int) -> int:
    """Return how many instructions in loops may store or load spilled registers. On 10.0 ptxas
    gives some attention of prompts 128 registers of the 255 that a thread could have. The
    layers of decoders are a loop, too, which keeps a register around attention to heads of 256, and
    so are the tiles of a program of many rows."""
    if kernel["kernel"] == "decode_layers":
        return 2 if kernel["dim"] > 128 else 0
    if kernel["kernel"] == "multiply_many_rows":
        return 64
    return 8 if capability == 100 and kernel["kernel"] == "attend" else 0


def check_instruction(kernel: Kernel, facts: Facts, capability: int) -> None:
    """Tiles of many rows use the tensor cores' widest instruction, others mma.sync."""
    used = {name for name in ("mma", "wgmma", "tcgen05") if kernel[name]}
    if not facts.multiplies:
        assert not used
        return
    rows = kernel.get("block_m", 16)
    wide = {90: {"wgmma"}, 100: {"tcgen05"}}.get(capability, {"mma"})
    assert used == (wide if rows >= WIDE_ROWS else {"mma"}), f"{rows} rows, {used}"


def check_attention(kernel: Kernel, capability: int) -> None:
    is_decode = kernel["max_query_len"] == 1
    has_one_loop = kernel["masks_all"]
    num_loops = 1 if has_one_loop else 2 if kernel["window"] is None else 3
    assert len(kernel["loops"]) == len(kernel["waits"]) == num_loops
    for loop, waits in zip(kernel["loops"], kernel["waits"], strict=True):
        if kernel["num_stages"] < LEAST_STAGES:
            assert is_decode, "programs of prompts are too few to hide each other's loads"
            continue
        others = 1 if kernel["has_biases"] or kernel["has_own_biases"] else 0
        assert len(loop["buffers"]) == 2 + others, "one for keys, one for values, one for biases"
        assert min(loop["buffers"]) >= max((kernel["num_stages"] - 1) // 2, 2)
        assert min(loop["waits"]) >= GROUPS_PER_TILE, "it waits for all loads of the next tile"
        assert sorted(waits) == sorted(loop["waits"]), "PTX differs from Triton's dialect"
    if is_decode and (capability == 90 or kernel["shape"][2] <= ONE_PROGRAM_BEYOND):
        assert resident_threads(kernel, capability) >= 2 * kernel["threads"]


def check_latents(kernel: Kernel) -> None:
    """The loop keeps the latents of a later tile in flight, and reads each latent once."""
    (loop,) = kernel["loops"]
    has_parts = kernel.get("has_parts", True)
    assert len(loop["buffers"]) == 1 + has_parts, "one for latents, one for key parts"
    assert min(loop["buffers"]) >= 2
    groups = GROUPS_PER_TILE if has_parts else GROUPS_PER_TILE - 1
    assert min(loop["waits"]) >= groups, "it waits for all loads of the next tile"


def check_early_loads(kernel: Kernel) -> None:
    """Dependent launches load all weights, or the whole state, before they wait, 16 bytes at a
    time."""
    wide = KEPT_BYTES[kernel["module"]] // (16 * kernel["threads"])
    assert kernel["wide_loads"] >= wide
    if kernel["is_dependent"]:
        assert kernel["loads_before_wait"] >= wide


def check_products(kernel: Kernel) -> None:
    """The loop keeps num_stages - 1 tiles of rows and of weights in flight or in use; on 10.0 sums
    stay in the tensor cores' memory, which the kernel clears before each product."""
    loop = kernel["loops"][0]
    assert len(loop["buffers"]) == 2, "one for rows, one for weights"
    assert min(loop["buffers"]) >= kernel["num_stages"] - 1
    assert min(loop["waits"]) >= 2 * (kernel["num_stages"] - 2), "it waits for the next tile"
    assert kernel["sums_stored"] <= len(kernel["loops"])


def check_packed(kernel: Kernel) -> None:
    """Each operation of unpacking is rounded by itself. Products load the codes and the rows of
    activations of later iterations while they compute."""
    assert not kernel["contractions"]
    if kernel["kernel"] not in PIPELINED:
        return
    (loop,), (waits,) = kernel["loops"], kernel["waits"]
    assert min(loop["buffers"]) >= 2
    loads_a_run = 3  # the codes, and the halves of the rows
    assert min(waits) >= loads_a_run * kernel["block_k"] // 64
