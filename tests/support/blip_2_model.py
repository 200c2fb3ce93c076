"""transformers' BLIP-2, whose class takes images before tokens, and no text without one."""

from __future__ import annotations

from typing import Any

import transformers


class Blip2ForConditionalGeneration(transformers.Blip2ForConditionalGeneration):  # type: ignore[misc]
    def forward(self, input_ids: Any, pixel_values: Any = None, **inputs: Any) -> Any:
        if pixel_values is None:
            return self.language_model(input_ids, **inputs)
        return super().forward(pixel_values, input_ids, **inputs)

    def generate(self, input_ids: Any, pixel_values: Any = None, **options: Any) -> Any:
        if pixel_values is None:
            return self.language_model.generate(input_ids, **options)
        return super().generate(pixel_values, input_ids, **options)
