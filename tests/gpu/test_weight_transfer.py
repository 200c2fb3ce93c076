"""A trainer on the engine's GPU sends CUDA IPC handles; one on another GPU broadcasts by NCCL.

tests/unit/transfer/test_ipc.py checks what is sent and refused with a fake, and
tests/process/test_weight_transfer.py the broadcasts with gloo.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.trainers import DictSource
from support.waiting import PATIENCE_S

from shmllm import LLM
from shmllm.errors import RequestError
from shmllm.trainer import (
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)

OPTIONS: dict[str, Any] = {
    "device": "cuda:0",
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2**26,
    "max_num_seqs": 4,
    "enforce_eager": True,
}


def new_weights(llm: LLM, device: str) -> dict[str, torch.Tensor]:
    names = llm.collective_rpc("list_weights")[0]
    old = {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}
    return {name: (weight * 0.5).to(device) for name, weight in old.items()}


def assert_equal(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        (found,) = llm.collective_rpc("get_weight", args=(name,))
        assert torch.equal(found.cpu(), weight.cpu()), name


@pytest.mark.parametrize("packed", [True, False])
def test_handles_make_it_the_new_model(packed: bool) -> None:
    with LLM("tiny", weight_transfer_config={"backend": "ipc"}, **OPTIONS) as llm:
        weights = new_weights(llm, "cuda:0")
        sender = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(packed, 2**20), client=llm, source=DictSource(weights)
        )
        for version in ("one", "two"):
            sender.send_weights(version)
            assert llm.get_weight_version() == version
            assert_equal(llm, weights)
        sender.source = DictSource({name: each * float("nan") for name, each in weights.items()})
        with pytest.raises(RequestError, match="finite"):
            sender.send_weights()
        assert_equal(llm, weights)
        sender.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process")
@pytest.mark.parametrize("packed", [True, False])
def test_a_broadcast_makes_it_the_new_model(packed: bool) -> None:
    with LLM("tiny", weight_transfer_config={"backend": "nccl"}, **OPTIONS) as llm:
        weights = new_weights(llm, "cuda:1")
        with torch.cuda.device(1):
            info = NCCLTrainerInitInfo("127.0.0.1", 0, 2, packed, 2**20, timeout_s=PATIENCE_S)
            sender = WeightTransferTrainerFactory.trainer_init(
                info, client=llm, source=DictSource(weights)
            )
            sender.send_weights("one")
            assert_equal(llm, weights)
            sender.shutdown()
