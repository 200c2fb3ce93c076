"""The options of low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.config.options import DType, Flag, Names, Section, Whole, option
from shmllm.errors import EngineStartError

LoraDType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA)."""

    enable_lora: bool = option(False, "Let requests name an adapter (LoRA).", Flag())
    max_loras: int = option(1, "Most adapters in a step; other requests wait.", Whole())
    max_lora_rank: int = option(16, "Largest rank of an adapter.", Whole(1, 512))
    max_cpu_loras: int | None = option(
        None,
        "Most adapters in memory; the least recently used one makes room.",
        Whole(optional=True),
        default_text="max_loras",
    )
    lora_dtype: LoraDType = option(
        "auto",
        "What adapters are stored as; auto is the model's dtype.",
        DType(get_args(LoraDType)),
    )
    target_modules: tuple[str, ...] | None = option(
        None,
        "The modules that adapters change, by the ends of their names, such as q_proj and "
        "gate_up_proj; what an adapter has of others is left out.",
        Names(),
        name="lora_target_modules",
        default_text="all that they can",
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise EngineStartError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras "
                f"({self.max_loras})"
            )

    @property
    def most_kept(self) -> int:
        """The largest number of adapters in memory."""
        return self.max_cpu_loras or self.max_loras

    @property
    def most_in_step(self) -> int:
        """The largest number of different adapters in a step; 0: the engine has none."""
        return self.max_loras if self.enable_lora else 0
