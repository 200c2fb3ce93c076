"""Tests models that draft in a whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_draft_heads import (
    BlockConformance,
    EagleConformance,
    FirstEagleConformance,
    MedusaConformance,
    ParallelEagleConformance,
)
from conformance.gpu_drafting_models import (
    DraftModelConformance,
    FurtherLayerConformance,
    further,
    other,
)
from conformance.gpu_drafts import directory

__all__ = ["directory", "further", "other"]


class TestDraftModel(DraftModelConformance):
    pass


class TestFurtherLayer(FurtherLayerConformance):
    pass


class TestEagle(EagleConformance):
    pass


class TestFirstEagle(FirstEagleConformance):
    pass


class TestParallelEagle(ParallelEagleConformance):
    pass


class TestBlock(BlockConformance):
    pass


class TestMedusa(MedusaConformance):
    pass
