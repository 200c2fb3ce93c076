"""Chooses the device that an engine runs on, and makes its runner with what plugins add.

This module imports the runner of the chosen device only: the GPU's runner loads Triton, and the
CPU's runner loads llvmlite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from shmllm.config.engine import CacheConfig, EngineConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.errors import EngineStartError
from shmllm.plugins.connectors import load_connector_class
from shmllm.plugins.entry_points import load_general_plugins, search_also
from shmllm.shared_kv.disk_folder import check_directory
from shmllm.worker import transcription
from shmllm.worker.fit_to_model import fit_to_model
from shmllm.worker.load_processors import load_processor_classes
from shmllm.worker.loaded_runner import LoadedRunner
from shmllm.worker.loading import Progress


def make_runner(
    config: EngineConfig, on_load: Progress | None = None, on_capture: Progress | None = None
) -> LoadedRunner:
    """Load plugins, and the model on the device that `config.device` names.

    Args:
        config: the engine's configuration.
        on_load: called with (bytes read, bytes in all) while weights are read.
        on_capture: called with (sizes captured, sizes in all) while CUDA graphs are captured.

    Raises:
        EngineStartError: see `CpuRunner` and `GpuRunner`; or a logits processor that an option
            names, or a KV connector, cannot be used.
    """
    search_also(config.plugins.search_path)
    problems = list(load_general_plugins())
    classes, unused = load_processor_classes(config.plugins.logits_processors or ())
    if config.plugins.kv_connector:
        load_connector_class(config.plugins.kv_connector)  # here, as weights take longer to read
    named = replace(config.plugins, logits_processors=tuple(classes))
    began_s = time.time()
    runner = _make_runner(replace(config, plugins=named), on_load, on_capture)
    runner.began_s = began_s
    if runner.info.items.num_encoded and "audio" in runner.info.items.modalities:
        classes[transcription.NAME] = transcription.TranscriptionRules
    if classes:
        try:
            runner.use_processors(classes)
        except BaseException:
            runner.close()
            raise
    warnings = (*runner.info.warnings, *problems, *unused)
    runner.info = replace(runner.info, logits_processors=tuple(classes), warnings=warnings)
    return runner


def _make_runner(
    config: EngineConfig, on_load: Progress | None, on_capture: Progress | None
) -> LoadedRunner:
    gpu, warning = choose_device(config.device)
    if gpu is not None:
        index = gpu_of_an_engine(config.parallel, gpu)
        return _make_gpu_runner(config, index, on_load, on_capture)
    if config.shared_kv.path is not None:
        check_directory(config.shared_kv.path)  # before the weights are read
    if config.parallel.pool_size > 1:
        from shmllm.parallel.cores import threads_of_an_engine

        threads = threads_of_an_engine(config.num_threads, config.parallel)
        config = replace(config, num_threads=threads)
    warnings = [] if warning is None else [warning]
    return _make_cpu_runner(config, on_load, [*warnings, *options_ignored_on_cpu(config)])


def _make_gpu_runner(
    config: EngineConfig, index: int, on_load: Progress | None, on_capture: Progress | None
) -> LoadedRunner:
    """Load a model on the GPU of an index, and on those behind it if several ranks compute it."""
    from shmllm.worker.gpu.device import CudaDevice
    from shmllm.worker.gpu.runner import GpuRunner

    size, option = config.parallel.num_processes, config.parallel.option
    if config.plugins.kv_connector:
        raise EngineStartError("kv_connector is for the CPU: pass device='cpu', or leave it out")
    if config.shared_kv.num_bytes is not None:
        if size > 1:
            raise EngineStartError(
                f"shared_kv_cache_bytes is not possible with {option} on GPUs: leave one of the "
                "two out"
            )
        if config.shared_kv.reads == "in_place":
            raise EngineStartError(
                "shared_kv_cache_reads='in_place' is for the CPU: a GPU copies shared blocks into "
                "its memory; pass 'copy', or leave the option out"
            )
    if size == 1:
        return GpuRunner(fit_to_model(config), CudaDevice(index), on_load, on_capture)
    if config.parallel.pipeline_parallel_size > 1:
        raise EngineStartError(f"{option} is for the CPU: pass device='cpu', or leave it out")
    check_gpus(option, index, size)
    config = fit_to_model(config)
    from shmllm.parallel.gpu_memory import GpuGroupMemory
    from shmllm.parallel.ranks import RankProcesses

    memory = GpuGroupMemory.create(size)
    ranks = RankProcesses(replace(config, device=f"cuda:{index}"), memory)
    try:
        return GpuRunner(config, CudaDevice(index), on_load, on_capture, ranks, memory)
    except BaseException:
        ranks.close()
        raise


def gpu_of_an_engine(parallel: ParallelConfig, first: int) -> int:
    """Return the index of an engine's first GPU. The engines of a pool have as many each as they
    have ranks.

    Args:
        parallel: the options for the pool and the ranks.
        first: the first GPU of the pool.

    Raises:
        EngineStartError: there are not as many.
    """
    count, size = parallel.pool_size, parallel.num_processes
    found = max(torch.cuda.device_count() - first, 0)
    if count > 1 and found < count * size:
        raise EngineStartError(
            f"data_parallel_size {count} needs {count * size} GPUs from cuda:{first} on, "
            f"{size} for each engine, and CUDA finds {found}; possible: 1 to {found // size}, or "
            "device='cpu'"
        )
    return first + parallel.pool_index * size


def check_gpus(option: str, index: int, size: int) -> None:
    """Raise EngineStartError if there are not as many GPUs as ranks that can be used and that can
    meet, from the one of an index on.

    Args:
        option: the option that asks for them, with its value.
        index: the index of the first one.
        size: their number.
    """
    from shmllm.worker.gpu.device import find_cuda_problem, find_link_problem

    count = max(torch.cuda.device_count() - index, 0)
    if count < size:
        raise EngineStartError(
            f"{option} needs {size} GPUs from cuda:{index} on, one for each rank, and CUDA finds "
            f"{count}; possible: 1 to {count}, or device='cpu'"
        )
    for each in range(index, index + size):
        if problem := find_cuda_problem(each):
            raise EngineStartError(f"{option}: {problem}")
    if problem := find_link_problem(range(index, index + size)):
        raise EngineStartError(f"{option}: {problem}; leave the option out, or pass device='cpu'")


def _make_cpu_runner(
    config: EngineConfig, on_load: Progress | None, warnings: Sequence[str]
) -> LoadedRunner:
    from shmllm.worker.cpu.runner import CpuRunner

    config = fit_to_model(config)
    if config.parallel.num_processes == 1:
        return CpuRunner(config, on_load, warnings)
    from shmllm.parallel.ranks import RankProcesses
    from shmllm.worker.cpu.pipelined_runner import PipelinedRunner

    make = CpuRunner if config.parallel.pipeline_parallel_size == 1 else PipelinedRunner
    ranks = RankProcesses(replace(config, device="cpu"))
    try:
        return make(config, on_load, warnings, ranks)
    except BaseException:
        ranks.close()
        raise


def choose_device(name: str) -> tuple[int | None, str | None]:
    """Find out whether the engine uses a GPU.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on; "auto" means the first GPU if there is one that
            can be used, else the CPU.

    Returns:
        The GPU's index, or None for the CPU; and a warning if "auto" finds a GPU that cannot be
        used, else None.

    Raises:
        EngineStartError: the GPU that `name` asks for cannot be used; the message says why.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.device_count()):
        return None, None
    from shmllm.worker.gpu.device import find_cuda_problem

    index = int(name.partition(":")[2] or 0)
    problem = find_cuda_problem(index)
    if not problem:
        return index, None
    if name == "auto":
        return None, f"the GPU is not used: {problem}"
    raise EngineStartError(f"device={name!r}: {problem}")


def options_ignored_on_cpu(config: EngineConfig) -> list[str]:
    """One sentence for each option that was set and has no effect on a CPU."""
    graphs, default = config.graphs, GraphConfig()
    no_graphs = "a CPU captures no graphs"
    options = (
        (
            "gpu_memory_utilization",
            config.cache.gpu_memory_utilization,
            CacheConfig().gpu_memory_utilization,
            "kv_cache_memory_bytes sizes the cache",
        ),
        ("enforce_eager", graphs.enforce_eager, default.enforce_eager, no_graphs),
        ("cudagraph_mode", graphs.mode, default.mode, no_graphs),
        (
            "cudagraph_capture_sizes",
            graphs.capture_sizes,
            default.capture_sizes,
            no_graphs,
        ),
        (
            "max_cudagraph_capture_size",
            graphs.max_capture_size,
            default.max_capture_size,
            no_graphs,
        ),
    )
    return [
        f"{name}={value!r} has no effect on a CPU: {reason}"
        for name, value, unset, reason in options
        if value != unset
    ]
