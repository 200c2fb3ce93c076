"""A part of gpu_check: copies of KV blocks from and to shared memory, checked and timed.

The blocks are those of Llama-3.1-8B, or of the rehearsal's tiny model.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu.clock import seconds
from gpu.figures import Figures
from gpu.rehearsal import open_device
from gpu.settings import Settings
from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout, Section, divide
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import create
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.shared_cache import GpuSharedCache, staged_bytes

BLOCK_SIZE = 16
REGION_BYTES = 2**30
REHEARSED_BYTES = 2**20
MOST_WAIT_S = 20.0
"""How long the registration of the region may take, in seconds."""


def run(settings: Settings, figures: Figures) -> None:
    shape = settings.shape("8b")
    part_bytes = 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim
    part_bytes *= getattr(torch, settings.dtype).itemsize
    num_bytes = REHEARSED_BYTES if settings.rehearsal else REGION_BYTES
    sections = divide(num_bytes, (1, shape.layers * part_bytes), (0, 0), 0.0)
    torch.manual_seed(0)
    with _region(RegionLayout(sections)) as region, open_device(settings) as device:
        figures.put("copies", measure(device, region, shape.layers, sections[0], settings.rounds))


def measure(
    device: Device, region: OwnRegion, layers: int, section: Section, rounds: int
) -> dict[str, Any]:
    """Saves blocks of a device to a region, loads them into others, and compares their bits.

    Args:
        device: the device.
        region: the region.
        layers: the number of buffers of the device's blocks.
        section: the blocks of the region.
        rounds: the number of repetitions of each copy; the median counts.

    Raises:
        AssertionError: the loaded blocks have other bits.
    """
    where, count = device.torch_device, section.num_blocks
    shape = layers, 2 * count, section.block_bytes // layers // 8
    buffers = torch.randint(2**62, shape, dtype=torch.int64).to(where)
    staging = torch.empty(staged_bytes(section.block_bytes, 0), dtype=torch.uint8, device=where)
    cache = GpuSharedCache([buffers.transpose(0, 1), None], staging, device)
    began = time.monotonic()
    firsts = cache.map(region.fd, region.layout)
    while cache.pinned_bytes < cache.mapped_bytes and time.monotonic() - began < MOST_WAIT_S:
        time.sleep(0.01)
    registering_s = time.monotonic() - began
    saves = [BlockCopy(0, n, firsts[0] + n) for n in range(count)]
    loads = [BlockCopy(0, firsts[0] + n, 2 * count - 1 - n) for n in range(count)]
    save_s = seconds(lambda: cache.save(saves), where, rounds)
    load_s = seconds(lambda: cache.load(loads), where, rounds)
    found = torch.equal(buffers[:, count:].flip(1), buffers[:, :count])
    pinned_bytes = cache.pinned_bytes
    device.synchronize()
    cache.unmap(firsts)
    assert found, "loaded blocks have other bits than those that were saved"
    num_bytes = count * section.block_bytes
    return {
        "bytes": num_bytes,
        "block_bytes": section.block_bytes,
        "registered_bytes": pinned_bytes,
        "registering_s": registering_s,
        "save_bytes_per_s": num_bytes / save_s,
        "load_bytes_per_s": num_bytes / load_s,
    }


@contextmanager
def _region(layout: RegionLayout) -> Iterator[OwnRegion]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shmllm-check-"))
    try:
        region = create(folder, layout, [0])
        yield region
        region.close()
    finally:
        shutil.rmtree(folder)
