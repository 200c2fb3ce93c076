"""The tests of heads that draft in a whole engine on a device: those of a layer behind the model.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_drafting_models import DRAFTED, FurtherLayerConformance
from conformance.gpu_engine import SHAPE
from support.block_heads import BlockHead
from support.draft_heads import EagleHead, FirstEagleHead
from support.medusa_heads import MedusaHeads
from support.model_helpers import reference_model, save

from shmllm.config.engine import EngineConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.models.config import ModelConfig
from shmllm.worker.fit_to_model import fit_to_model

HEAD = "head"
"""The directory of a head, below that of its model."""


class EagleConformance(FurtherLayerConformance):
    """Of an EAGLE-3 head, by the same tests."""

    @pytest.fixture(scope="class")
    @classmethod
    def further(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A model, with a head in a directory below it."""
        target = eagle_target()
        directory = save(target, tmp_path_factory.mktemp("llama"))
        cls.save_head(target, directory / HEAD)
        return directory

    @staticmethod
    def save_head(target: Any, directory: Path) -> None:
        """Write a head for a model."""
        options = {"norm_before_residual": True, "fc_norm": True}
        head = EagleHead(target, levels=(1, 2), has_table=False, **options)
        head.save(directory, "speculators")

    def with_drafts(self, config: EngineConfig, count: int = 1) -> EngineConfig:
        return with_head(config, Path(config.load.directory) / HEAD, count)

    def make_model(self, directory: Path, scale: float) -> Path:
        return save(eagle_target(scale), directory)


class FirstEagleConformance(EagleConformance):
    """Of a head of EAGLE 1, by the same tests."""

    @staticmethod
    def save_head(target: Any, directory: Path) -> None:
        FirstEagleHead(target, bias=True).save(directory)


class ParallelEagleConformance(EagleConformance):
    """Of a head of P-EAGLE, by the same tests."""

    @staticmethod
    def save_head(target: Any, directory: Path) -> None:
        EagleHead(target, levels=(1, 2), mask_token=5).save(directory, "speculators")


class BlockConformance(EagleConformance):
    """Of a head of DFlash, by the same tests."""

    @staticmethod
    def save_head(target: Any, directory: Path) -> None:
        BlockHead(target, layers=(0, 1), num_layers=1).save(directory)


class MedusaConformance(EagleConformance):
    """Of heads of Medusa, by the same tests."""

    @staticmethod
    def save_head(target: Any, directory: Path) -> None:
        MedusaHeads(target, bias=True).save(directory)


def eagle_target(scale: float = 1.0) -> Any:
    """A model of two layers."""
    return reference_model("llama", scale, **SHAPE | {"num_hidden_layers": 2})


def with_head(config: EngineConfig, head: Path, count: int = DRAFTED) -> EngineConfig:
    """The configuration of an engine for which a head drafts."""
    found: Any = ModelConfig.from_directory(head).drafting
    options = {"adaptive": False, "model": head.name, "model_directory": str(head)}
    speculative = SpeculativeConfig(found.method, count, **options)
    return fit_to_model(replace(config, speculative=speculative))
