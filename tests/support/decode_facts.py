"""What compiled kernels of decode steps must be like, beyond `kernel_facts`.

Each function checks launches of one kind: products of one or few rows, attention of decodes, FP8
keys and values, experts of few tokens.
"""

from __future__ import annotations

from support.kernel_facts import (
    LOADED,
    ONE_PROGRAM_BEYOND,
    REGISTERS,
    SHARED_BYTES,
    SYSTEM_BYTES,
    Kernel,
    check,
    check_attention,
    resident_threads,
)

FLOAT8_SPILLS = {80: 4, 90: 224}
"""The instructions that load or store spilled registers in the loops of prompts with heads of 512
and FP8 keys, by capability. On 9.0 their sums take half of the registers; these are a fifth of the
instructions in these loops."""
MASK_LOADS = 8
"""Behind its loop a split program passes the mask of its rows through shared memory, in bytes."""
WORDS_OF_BLOCK = 5
"""Of a program of experts: the number of blocks, a block's expert, first place and size, and one or
more pairs."""


def check_decodes(found: list[Kernel], capability: int) -> None:
    """Nothing spills. Dependent launches have loaded a tile before they wait, but attention of
    contexts that are not split, of which there are many programs. Programs with and without a part
    ask for weights ahead, behind the wait."""
    check(found, capability)
    for kernel in found:
        threads = kernel["threads"]
        assert least_programs(kernel) * kernel["registers"] * threads <= REGISTERS
        assert (kernel["early_loads"] is None) == (capability < 90)
        if capability < 90:
            continue
        if kernel.get("splits") == 1:
            assert not kernel["cache_requests"]
            continue
        if kernel["kernel"] == "multiply_single_row":
            tile = kernel["block_n"] * kernel["block_k"]
            assert kernel["early_loads"] == tile // (LOADED * threads)
        else:
            _, _, dim = kernel["shape"]
            assert kernel["early_loads"] >= 2 * kernel["tile"] * dim // (LOADED * threads)
            asks = max(4 // kernel["num_warps"], 1) if kernel["asks_ahead"] else 0
            assert kernel["cache_requests"] == 2 * asks
            assert kernel["requests_after_wait"] == asks


def least_programs(kernel: Kernel) -> int:
    """Return how many programs of a decode a multiprocessor holds at least."""
    if kernel["kernel"] == "multiply_single_row":
        return 4
    is_large = kernel.get("tokens", 1) > 1 or has_wide_heads(kernel)
    return 1 if is_large and kernel["num_warps"] > 4 else 2


def has_wide_heads(kernel: Kernel) -> bool:
    """Return whether a program of attention has heads of which two fill a multiprocessor."""
    return "shape" in kernel and kernel["shape"][2] > ONE_PROGRAM_BEYOND


def check_few_rows(found: list[Kernel], capability: int) -> None:
    """Nothing spills, tensor cores multiply rows of halves, two programs or more fit on a
    multiprocessor, an iteration is loaded while others are in flight, and dependent launches have
    begun to load weights before they wait."""
    check(found, capability)
    for kernel in found:
        threads = kernel["threads"]
        assert 2 * kernel["registers"] * threads <= REGISTERS
        if capability >= 90:
            assert kernel["loads_before_wait"]
        if kernel["dtype"] == "torch.float32":
            continue
        if capability != 80:  # it has room for one
            assert 2 * (kernel["shared_bytes"] + SYSTEM_BYTES) <= SHARED_BYTES[capability]
        for loop, waits in zip(kernel["loops"], kernel["waits"], strict=True):
            assert min(loop["buffers"]) >= kernel["num_stages"] - 1
            # The weights and the rows, in halves; codes of 4 bits are loaded once for both halves.
            loads_an_iteration = 3 if "packed" in kernel else 4
            in_flight = (kernel["num_stages"] - 2) * loads_an_iteration
            assert min(waits) >= in_flight, "it waits for loads of later iterations"
        if "packed" in kernel:
            assert not kernel["contractions"], "an operation of unpacking is not rounded"
        elif capability >= 90:
            tile = kernel["block_n"] * 2 * kernel["depth"] * kernel["num_warps"]
            assert kernel["early_loads"] >= tile // (LOADED * threads)


def check_many_rows(found: list[Kernel], capability: int) -> None:
    """A program loads tiles of both operands some iterations ahead, and spills nothing in the loop
    that multiplies them."""
    check(found, capability)
    for kernel in found:
        operands = 3 if kernel["is_gated"] else 2
        loops = [loop for loop in kernel["loops"] if loop["buffers"]]
        assert [loop["buffers"] for loop in loops] == [[kernel["num_stages"]] * operands]
        assert kernel["tile_loads"] >= operands * kernel["num_stages"]
        assert not kernel["spills_in_products"]


def check_decoders(found: list[Kernel], capability: int) -> None:
    """A program of all layers fits on a multiprocessor, and spills in no loop of a phase. Programs
    meet five times a layer, and have loads in flight while they wait: their first weights, or keys
    and values. Products load iterations ahead. From 9.0 on, the cache is asked four times a layer.
    """
    check(found, capability)
    for kernel in found:
        assert kernel["registers"] * kernel["threads"] <= REGISTERS
        waits = kernel["meetings"]
        assert len(waits) == 6, "programs without a part of attention wait, too"
        assert kernel["cache_requests"] == (4 if kernel["asks_cache"] and kernel["ahead"] else 0)
        if kernel["dtype"] == "torch.float32":
            continue
        tile = kernel["block_n"] * 2 * kernel["depth"] * kernel["num_warps"]
        of_products = waits[:1] + waits[3:]
        assert min(of_products) >= tile // (LOADED * kernel["threads"])
        of_keys = 2 * kernel["tile"] * kernel["dim"] // (1 + kernel["has_float8"])
        assert waits[1] >= of_keys // (LOADED * kernel["threads"])
        products = [loop for loop in kernel["loops"] if len(loop["buffers"]) >= 4]
        assert len(products) == 4
        for loop in products:
            assert min(loop["buffers"]) >= kernel["num_stages"] - 1
            assert min(loop["waits"]) >= 4 * (kernel["num_stages"] - 2)


def check_packed_rows(found: list[Kernel], capability: int) -> None:
    """Nothing spills, each operation of unpacking is rounded by itself, two programs or more fit on
    a multiprocessor, and dependent launches have begun to load before they wait."""
    check(found, capability)
    for kernel in found:
        assert not kernel["contractions"]
        assert resident_threads(kernel, capability) >= 2 * kernel["threads"]
        if capability >= 90:
            assert kernel["loads_before_wait"]


def check_experts(kernel: Kernel, capability: int) -> None:
    """Products use tensor cores, and while they wait for one tile, the copies of all others but one
    are in flight. Few rows have so many programs on a multiprocessor of an H100 as the arithmetic
    says. The last product, when dependent, has read its block before it waits: so the first one,
    which waits for the launch that lays out the blocks, lets it begin behind that."""
    if capability >= 90 and kernel["kernel"] == "multiply_down":
        assert kernel["loads_before_wait"] >= WORDS_OF_BLOCK
    elif capability >= 90:
        assert not kernel["loads_before_wait"]
        assert not kernel["is_followed_early"]
    if capability == 100 and kernel["block_m"] > 16:
        return  # the loops of tcgen05.mma have waits of another kind
    (loop,) = kernel["loops"]
    assert len(loop["buffers"]) == 2, "one for rows, one for weights"
    assert min(loop["buffers"]) >= kernel["num_stages"] - 1
    assert min(loop["waits"]) >= 2 * (kernel["num_stages"] - 2)
    if kernel["dtype"] != "torch.float32":  # in PTX, loops are found by their tensor cores
        (waits,) = kernel["waits"]
        assert sorted(waits) == sorted(loop["waits"]), "PTX differs from Triton's dialect"
    if capability == 90 and kernel["block_m"] == 16:
        assert 5 * (kernel["shared_bytes"] + SYSTEM_BYTES) <= SHARED_BYTES[90] + SYSTEM_BYTES
        assert 5 * kernel["registers"] * 32 * kernel["num_warps"] <= REGISTERS


def check_float8(found: list[Kernel], capability: int) -> None:
    """Nothing spills in a loop but with heads of 512, loads are in flight as for other keys and
    values, and no key is read from shared memory byte by byte. From 8.9 on the hardware converts:
    two numbers at a time, and to bfloat16 by fast instructions."""
    check_float8_latents([kernel for kernel in found if "heads" in kernel], capability)
    (write,) = (kernel for kernel in found if kernel["kernel"] == "_rope_write")
    of_decodes = [kernel for kernel in found if kernel["kernel"] == "attend_decodes"]
    loading = [*of_decodes, *(kernel for kernel in found if kernel["kernel"] == "attend")]
    assert of_decodes
    assert (len(loading) > len(of_decodes)) == (capability < 100)
    assert not write["stack_bytes"]
    assert bool(write["to_float8"]) == (capability >= 89)
    for kernel in loading:
        print(kernel)
        _, _, dim = kernel["shape"]
        is_wide = kernel["kernel"] == "attend" and kernel["max_query_len"] > 1 and dim > 128
        assert kernel["has_float8"]
        if is_wide and dim > ONE_PROGRAM_BEYOND:
            assert kernel["spills_in_loops"] <= FLOAT8_SPILLS[capability]
        else:
            assert not kernel["spills_in_loops"]
        assert not kernel["slow_conversions"]
        if capability >= 90 or not is_wide:
            assert kernel["byte_loads"] <= MASK_LOADS
        assert bool(kernel["from_float8"]) == (capability >= 89)
        assert kernel["mma"] or kernel["wgmma"] or kernel["tcgen05"]
        if kernel["kernel"] == "attend":
            check_attention(kernel, capability)
            continue
        assert bool(kernel["to_float8"]) == (capability >= 89)
        threads = kernel["threads"]
        assert least_programs(kernel) * kernel["registers"] * threads <= REGISTERS
        if kernel["early_loads"] is not None and kernel["splits"] > 1:
            assert kernel["early_loads"] >= 2 * kernel["tile"] * dim // (2 * LOADED * threads)


def check_float8_latents(found: list[Kernel], capability: int) -> None:
    """Latent attention to FP8 has the facts of that to other latents, and converts as
    `check_float8` says. Both launches that write latents round them."""
    check(found, capability)
    assert {"attend_latents", "_write_latents", "_absorb_queries"} <= {
        kernel["kernel"] for kernel in found
    }
    by_hardware = capability >= 89
    for kernel in found:
        if kernel["kernel"] == "attend_latents":
            assert bool(kernel["from_float8"]) == by_hardware
            assert not kernel["slow_conversions"]
            assert not kernel["byte_loads"]
        elif kernel["kernel"] in ("_write_latents", "_absorb_queries"):
            assert bool(kernel["to_float8"]) == by_hardware
