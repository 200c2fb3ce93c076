"""What images change in a model's steps, on a GPU."""

from __future__ import annotations

from conformance.gpu_items import ItemsConformance, _inference_mode, items_models

__all__ = ["_inference_mode", "items_models"]


class TestItems(ItemsConformance):
    pass
