"""The trainer's side of weight transfer, with vLLM's names; docs/rl.md has an example."""

from shmllm.trainer.factory import WeightTransferTrainerFactory
from shmllm.trainer.requests import WeightTransferInitRequest, WeightTransferUpdateRequest
from shmllm.transfer.ipc import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from shmllm.transfer.sender import Sender as TrainerWeightTransferEngine
from shmllm.transfer.source import ModuleSource, ParamMeta, WeightSource
from shmllm.transfer.trainer_info import (
    GlooTrainerInitInfo,
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    NCCLWeightTransferInitInfo,
    ShmTrainerInitInfo,
    TrainerInitInfo,
)
from shmllm.transfer.update_info import UpdateInfo as NCCLWeightTransferUpdateInfo

__all__ = [
    "GlooTrainerInitInfo",
    "IPCTrainerInitInfo",
    "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo",
    "ModuleSource",
    "NCCLTrainerInitInfo",
    "NCCLWeightTransferInitInfo",
    "NCCLWeightTransferUpdateInfo",
    "ParamMeta",
    "ShmTrainerInitInfo",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "WeightSource",
    "WeightTransferInitRequest",
    "WeightTransferTrainerFactory",
    "WeightTransferUpdateRequest",
]
