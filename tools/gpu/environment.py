"""A part of gpu_check: card, driver, versions, and the card's bandwidth, flops and launch time."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

from gpu.clock import host_seconds_per_call, seconds
from gpu.figures import Figures
from gpu.settings import Settings
from shmllm.cli.bench_output import describe_machine
from shmllm.version import __version__

PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "numpy", "posix-ipc", "llguidance")


def run(settings: Settings, figures: Figures) -> None:
    device = torch.device(settings.device)
    figures.put("host", describe_machine())
    figures.put("versions", versions())
    figures.put("card", describe_card(device))
    figures.put("bandwidth", bandwidth(settings, device))
    figures.put("gemm", gemm(settings, device))
    figures.put("launch", launches(settings, device))


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"shmllm": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def describe_card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "no GPU", "driver": None}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "total_bytes": total,
        "free_bytes": free,
        "driver": _driver(),
    }


def bandwidth(settings: Settings, device: torch.device) -> dict[str, float]:
    """Measures the bytes per second of a large copy (bytes read plus bytes written), and of
    several operations that only read."""
    source = torch.randn(settings.copied_bytes // 4, device=device)
    target = torch.empty_like(source)

    def rate(work: Any, num_bytes: int) -> float:
        return num_bytes / seconds(work, device, settings.rounds)

    half = source.numel() // 2
    reads = {
        "sum": lambda: source.sum(),
        "max": lambda: source.max(),
        "dot": lambda: torch.dot(source[:half], source[half:]),
    }
    found = {"copy": rate(lambda: target.copy_(source), 2 * source.nbytes)}
    found |= {name: rate(work, source.nbytes) for name, work in reads.items()}
    return found | {"read": max(found[name] for name in reads)}


def gemm(settings: Settings, device: torch.device) -> dict[str, float]:
    """Measures the flops per second of a large square product. It uses random numbers, because a
    product of zeros is faster."""
    size, dtype = settings.product_size, getattr(torch, settings.dtype)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    took = seconds(lambda: torch.mm(a, b, out=out), device, settings.rounds)
    return {"size": size, "flops_per_s": 2 * size**3 / took, "ms": took * 1e3}


def launches(settings: Settings, device: torch.device) -> dict[str, float]:
    """Measures the microseconds of a minimal kernel, launched directly and as a graph."""
    one = torch.zeros(1, device=device)
    host, whole = host_seconds_per_call(lambda: one.add_(1), device, settings.num_launches)
    found = {"host_us": host * 1e6, "whole_us": whole * 1e6}
    if device.type != "cuda":
        return found
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)
    host, whole = host_seconds_per_call(graph.replay, device, settings.num_launches)
    return found | {"graph_host_us": host * 1e6, "graph_whole_us": whole * 1e6}


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
