"""The trainer's side of weight transfer, with vLLM's names; docs/rl.md has an example."""

from shmllm.trainer.factory import WeightTransferTrainerFactory
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

__all__ = [
    "GlooTrainerInitInfo",
    "IPCTrainerInitInfo",
    "ModuleSource",
    "NCCLTrainerInitInfo",
    "NCCLWeightTransferInitInfo",
    "ParamMeta",
    "ShmTrainerInitInfo",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "WeightSource",
    "WeightTransferTrainerFactory",
]
