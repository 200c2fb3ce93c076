"""All layers of a model in one launch, on a GPU."""

from __future__ import annotations

from conformance.gpu_persistent import PersistentConformance
from conformance.gpu_program import _inference_mode, models

__all__ = ["_inference_mode", "models"]


class TestPersistent(PersistentConformance):
    pass
