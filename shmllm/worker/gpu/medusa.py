"""Heads that read the last hidden state of a request, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.models.medusa_model import MedusaModel
from shmllm.worker.arena import Arena
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import DraftDispatcher
from shmllm.worker.gpu.multi_token_prediction import further_dispatcher, kept_states
from shmllm.worker.gpu.step_messages import StepMessage
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.medusa_drafter import MedusaDrafter
from shmllm.worker.step_drafter import StepDrafter


class GpuHeadSteps:
    """See `HeadSteps`.

    Args:
        model: the heads.
        kept: [rows, hidden], the hidden state that each row keeps.
        launches: samples.
        device: the device.
    """

    def __init__(
        self, model: MedusaModel, kept: Tensor, launches: DraftLaunches, device: Device
    ) -> None:
        self._model = model
        self._kept = kept
        self._launches = launches
        self._transfers = Transfers(device)

    def keep(self, hidden: Tensor, rows: LongArray, chosen: LongArray) -> None:
        where, tokens = self._transfers.send(rows, chosen)
        self._kept.index_copy_(0, where, hidden.index_select(0, tokens))

    def sample(self, place: int, rows: LongArray, positions: LongArray) -> None:
        where, *sent = self._transfers.send(rows, rows.astype("int32"), positions)
        logits = self._model.predict(place, self._kept.index_select(0, where))
        self._launches.sample(logits, rows, positions, *sent)

    def finish(self) -> None:
        self._launches.finish()


@dataclass(frozen=True, slots=True)
class MedusaResources:
    """See `DraftResources` and `DraftProgram`: the heads have no keys and values, and no graphs.

    Attributes:
        model: the heads.
        dispatcher: see `DraftResources`.
        kept: [rows, hidden], the hidden state that each row keeps.
        max_rows: the largest number of requests that get drafts in a step.
        device: the device.
    """

    model: MedusaModel
    dispatcher: DraftDispatcher
    kept: Tensor
    max_rows: int
    device: Device

    @classmethod
    def of(cls, config: EngineConfig, model: MedusaModel, device: Device) -> MedusaResources:
        """Make them for an engine."""
        kept = kept_states(config, model, device)
        return cls(model, further_dispatcher(config, 0), kept, config.max_drafting, device)

    @property
    def buffers(self) -> Sequence[Arena]:
        return ()

    @property
    def num_captured(self) -> int:
        return 0

    def run_largest(self, cache: GpuKVCache) -> None:
        self.model.predict(0, self.kept[: self.max_rows])

    def make_program(self, cache: GpuKVCache) -> MedusaResources:
        return self

    def capture(self) -> CaptureReport:
        for count in {1, self.max_rows}:
            self.model.predict(0, self.kept[:count])
        return CaptureReport(0.0, 0, 0)

    def play(self, step: StepMessage) -> None:
        raise AssertionError("rank 0 alone has the heads")

    def make_drafter(self, batch: InputBatch, launches: DraftLaunches) -> StepDrafter:
        return MedusaDrafter(GpuHeadSteps(self.model, self.kept, launches, self.device), batch)
