"""Reads the adapter_config.json of a low-rank adapter, in the format of PEFT.

This module owns the fields: which are computed with, which change nothing here, and which are
refused. It must not know the tensors of an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmllm.models.fields import Fields

CONFIG_FILE = "adapter_config.json"

_READ = {
    "alpha_pattern",
    "bias",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_parameters",
    "use_rslora",
}
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""The fields about training, or about which modules have tensors, which the names of these say."""
_PLAIN_STARTS = {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}
"""The ways to begin the training that leave the base's weights as they are."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The rank and the factor of each module.

    Attributes:
        rank: of modules without one of their own.
        alpha: likewise.
        is_stabilized: the factor is alpha / sqrt(rank), and not alpha / rank (Kalajdzievski, "A
            Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023).
        ranks, alphas: those of some modules, by a pattern of the ends of their names.
        parameters: the ends of the names of parameters that are adapted by themselves.
    """

    rank: int
    alpha: float
    is_stabilized: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    parameters: Sequence[str]

    @classmethod
    def from_fields(cls, fields: Fields) -> PeftConfig:
        """Reads the fields.

        Raises:
            EngineStartError: a field is not valid, or asks for something that is not computed.
        """
        kind, bias = fields.text("peft_type", "LORA"), fields.text("bias", "none")
        if kind != "LORA":
            raise fields.error(f"'peft_type' must be 'LORA', not {kind!r}")
        if bias != "none":
            raise fields.error(f"'bias' must be 'none', not {bias!r}: biases are not adapted")
        start = fields.values.get("init_lora_weights")
        if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
            raise fields.error(
                f"'init_lora_weights' {start!r} changes the base's weights; convert it to a plain "
                "adapter with peft's path_initial_model_for_weight_conversion"
            )
        known = _READ | _WITHOUT_EFFECT | {"init_lora_weights"}
        for name, value in fields.values.items():
            if value and name not in known:
                raise fields.error(f"{name!r} is not supported")
        return cls(
            fields.integer("r", 8),
            fields.number("lora_alpha", 8),
            fields.flag("use_rslora", False),
            _patterns(fields, "rank_pattern"),
            _patterns(fields, "alpha_pattern"),
            fields.texts("target_parameters"),
        )

    def is_parameter(self, name: str) -> bool:
        """Whether a parameter is adapted by itself, and not as the weight of a plain module."""
        return any(f".{name}".endswith(f".{end}") for end in self.parameters)

    def of_module(self, name: str) -> tuple[int, float]:
        """Returns the rank and the factor of a module, or of a parameter of `parameters`."""
        rank = _matching(self.ranks, name, self.rank)
        alpha = _matching(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_stabilized else rank)


def _patterns(fields: Fields, name: str) -> dict[re.Pattern[str], Any]:
    table = fields.table(name)
    own = Fields(table, f"{fields.where}: {name!r}")
    read = own.integer if name == "rank_pattern" else own.number
    found = {}
    for key in table:
        try:
            found[re.compile(rf"(.*\.)?({key})$")] = read(key)
        except re.error as problem:
            raise fields.error(f"{name!r} has the invalid pattern {key!r}: {problem}") from None
    return found


def _matching(patterns: Mapping[re.Pattern[str], Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches, as PEFT does."""
    values = (value for pattern, value in patterns.items() if pattern.match(name))
    return next(values, default)
