"""Small tensors of blocks of a CPU, behind which regions may be mapped."""

from __future__ import annotations

import torch

from shmllm.worker.cpu.roomy_arena import RoomyArena

KV_PART, STATE_PART = 1024, 4096
NUM_KV_BUFFERS, NUM_STATE_BUFFERS = 3, 2


def make_buffers(is_in_place: bool) -> tuple[list[list[torch.Tensor]], RoomyArena | None]:
    """Random blocks: five of keys and values, and four of states. Returns the buffers of each
    section, and the arena if regions can be mapped behind them."""
    per_id = NUM_KV_BUFFERS * KV_PART + NUM_STATE_BUFFERS * STATE_PART
    arena = RoomyArena(0, per_id) if is_in_place else None
    shapes = [(5, KV_PART)] * NUM_KV_BUFFERS + [(4, STATE_PART)] * NUM_STATE_BUFFERS
    tensors = [
        torch.zeros(shape, dtype=torch.uint8)
        if arena is None
        else arena.allocate(shape, torch.uint8)
        for shape in shapes
    ]
    for tensor in tensors:
        tensor.random_()
    return [tensors[:NUM_KV_BUFFERS], tensors[NUM_KV_BUFFERS:]], arena
