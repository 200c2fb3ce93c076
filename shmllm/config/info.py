"""What an engine reports about itself and its model when it is ready."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from shmllm.config.engine import SchedulingPolicy, WaitPolicyName


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a ready engine says about itself.

    Attributes:
        model_directory: where tokenizer and configuration are.
        model_type: the architecture's name from config.json.
        num_blocks: KV blocks that requests can use.
        weight_bytes: the weights, as they are held and computed with.
        max_logprobs: alternatives that a request may ask for, at most vocab_size.
        device: what it runs on: "cpu", or a GPU's name.
        async_scheduling: steps are planned while the ones before them run.
        graphs: what was captured, in words; empty: nothing.
        warnings: what the person who started the engine should know, one sentence each.
    """

    model_directory: str
    model_type: str
    dtype: str
    num_parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    num_threads: int
    wait_policy: WaitPolicyName
    load_seconds: float
    max_logprobs: int = 20
    scheduling_policy: SchedulingPolicy = "fcfs"
    hidden_size: int = 0
    deterministic: bool = False
    device: str = "cpu"
    async_scheduling: bool = False
    graphs: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def processor(self) -> str:
        """What computes, for people."""
        return f"{self.num_threads} threads" if self.device == "cpu" else self.device

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineInfo:
        values: dict[str, Any] = json.loads(text)
        for name in ("eos_token_ids", "warnings"):
            values[name] = tuple(values[name])
        return cls(**{each.name: values[each.name] for each in fields(cls)})
