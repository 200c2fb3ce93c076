"""The choice of the device, on simulated machines."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from support.variants import slow

from shmllm import LLM
from shmllm.config.engine import CacheConfig, EngineConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.config.plugins import PluginConfig
from shmllm.config.shared_kv import SharedKVConfig
from shmllm.errors import EngineStartError
from shmllm.worker.gpu import device as gpu_device
from shmllm.worker.make_runner import (
    check_gpus,
    choose_device,
    gpu_of_an_engine,
    make_runner,
    options_ignored_on_cpu,
)


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the number of GPUs, and why the engine cannot use one."""

    def describe(count, problem=""):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(gpu_device, "find_cuda_problem", lambda index: problem)

    return describe


@pytest.mark.parametrize(
    ("count", "name", "expected"),
    [
        (0, "auto", None),
        (0, "cpu", None),
        (2, "cpu", None),
        (1, "auto", 0),
        (1, "cuda", 0),
        (2, "cuda:1", 1),
    ],
)
def test_the_device_of_a_name(machine, count, name, expected):
    machine(count)
    assert choose_device(name) == (expected, None)


@pytest.mark.parametrize("count", [0, 1])
def test_a_requested_gpu_that_cannot_be_used_is_an_error_with_the_reason(machine, count):
    machine(count, "it is too old")
    with pytest.raises(EngineStartError, match="device='cuda:0': it is too old"):
        choose_device("cuda:0")


def test_auto_ignores_a_gpu_that_cannot_be_used_with_a_warning(machine):
    machine(1, "it is too old")
    assert choose_device("auto") == (None, "the GPU is not used: it is too old")


@pytest.mark.parametrize(("count", "index", "found"), [(1, 0, 1), (3, 2, 1), (0, 0, 0)])
def test_fewer_gpus_than_ranks_are_refused_with_their_number(machine, count, index, found):
    machine(count)
    wanted = f"needs 2 GPUs from cuda:{index} on, one for each rank, and CUDA finds {found}; "
    with pytest.raises(EngineStartError, match=wanted):
        check_gpus("tensor_parallel_size 2", index, 2)


def test_gpus_that_cannot_meet_are_refused(machine, monkeypatch):
    machine(4)
    monkeypatch.setattr(
        gpu_device, "find_link_problem", lambda indices: f"{list(indices)} have no link"
    )
    with pytest.raises(EngineStartError, match=r"size 2: \[1, 2\] have no link; leave the option"):
        check_gpus("tensor_parallel_size 2", 1, 2)


def test_a_pipeline_is_for_cpus(machine):
    machine(2)
    config = EngineConfig(
        LoadConfig("m"), device="cuda", parallel=ParallelConfig(pipeline_parallel_size=2)
    )
    with pytest.raises(EngineStartError, match="pipeline_parallel_size 2 is for the CPU"):
        make_runner(config)


def test_gpus_read_no_shared_blocks_in_place(machine):
    machine(1)
    shared = SharedKVConfig(2**20, "in_place")
    config = EngineConfig(LoadConfig("m"), device="cuda", shared_kv=shared)
    with pytest.raises(EngineStartError, match="'in_place' is for the CPU: a GPU copies"):
        make_runner(config)


def test_gpus_have_no_connector(machine):
    machine(1)
    plugins = PluginConfig(kv_connector="support.connectors:InMemory")
    config = EngineConfig(LoadConfig("m"), device="cuda", plugins=plugins)
    with pytest.raises(EngineStartError, match="kv_connector is for the CPU: pass device='cpu'"):
        make_runner(config)


def test_a_wrong_connector_ends_a_start_before_weights_are_read():
    config = EngineConfig(LoadConfig("absent"), plugins=PluginConfig(kv_connector="Disk"))
    with pytest.raises(EngineStartError, match="kv_connector 'Disk' is not known"):
        make_runner(config)


def test_options_for_gpus_have_a_warning_on_a_cpu():
    assert options_ignored_on_cpu(EngineConfig(LoadConfig("m"))) == []
    config = EngineConfig(
        LoadConfig("m"),
        CacheConfig(gpu_memory_utilization=0.5),
        graphs=GraphConfig("FULL", (1, 2), 2, True),
    )
    messages = "\n".join(options_ignored_on_cpu(config))
    for words in ("gpu_memory_utilization=0.5", "enforce_eager=True", "cudagraph_mode='FULL'"):
        assert f"{words} has no effect on a CPU" in messages
    assert "cudagraph_capture_sizes=(1, 2)" in messages
    assert "max_cudagraph_capture_size=2" in messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("multiprocess", [False, slow(True)])
def test_a_front_end_gets_errors_and_warnings(multiprocess, caplog):
    options = {"kv_cache_memory_bytes": 2**24, "multiprocess": multiprocess}
    with pytest.raises(EngineStartError, match="device='cuda': there is no GPU to use"):
        LLM(device="cuda", **options)
    with (
        caplog.at_level(logging.WARNING),
        LLM(device="cpu", enforce_eager=True, block_size=64, **options) as llm,
    ):
        assert llm.facts.device == "cpu"
        assert llm.facts.block_size == 64
    assert "enforce_eager=True has no effect on a CPU" in caplog.text


@pytest.mark.parametrize(("index", "size", "expected"), [(0, 1, 1), (1, 1, 2), (1, 2, 3)])
def test_each_engine_of_a_pool_has_its_own_gpus(machine, index, size, expected):
    machine(5)
    parallel = ParallelConfig(tensor_parallel_size=size, pool_size=2, pool_index=index)
    assert gpu_of_an_engine(parallel, 1) == expected


def test_a_pool_with_too_few_gpus_is_refused_with_the_numbers(machine):
    machine(3)
    parallel = ParallelConfig(tensor_parallel_size=2, pool_size=2)
    with pytest.raises(EngineStartError, match=r"needs 4 GPUs from cuda:1 .* 2; possible: 1 to 1"):
        gpu_of_an_engine(parallel, 1)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {}),
        ({"load_format": "dummy", "seed": 3}, {"seed of random weights": 3}),
        ({"hf_overrides": {"rms_norm_eps": 0.5}}, {"hf_overrides": {"rms_norm_eps": 0.5}}),
        ({"enable_lora": True, "lora_dtype": "bfloat16"}, {"lora_dtype": "bfloat16"}),
        ({"seed": 3, "logprobs_mode": "raw_logits"}, {}),
    ],
    ids=str,
)
def test_an_engine_reports_the_options_that_change_its_model(options, shown):
    small = {"num_threads": 1, "kv_cache_memory_bytes": 2**22, "max_model_len": 64}
    with LLM("tiny", multiprocess=False, **small, **options) as llm:
        info = llm.front_end.info
    assert json.loads(info.model_options) == {"model_impl": "auto"} | shown
    assert info.logprobs_mode == options.get("logprobs_mode", "raw_logprobs")
