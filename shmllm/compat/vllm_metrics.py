"""`vllm.v1.metrics.reader`: the engine's counters and gauges as vLLM's Metric objects.

`LLM.get_metrics` of shmllm returns all values as a dict; this module has those that vLLM has, too,
under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Metric:
    """A value with vLLM's name and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters in a list: of accepted tokens, by their place in the draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """Counts by upper bound. None exists: `shmllm engine start --metrics-port` serves them."""

    count: int
    sum: float
    buckets: dict[str, int]


GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}
COUNTERS = {
    "prefix_cache_queries": "prefix_query_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
    "external_prefix_cache_queries": "shared_query_tokens",
    "external_prefix_cache_hits": "shared_hit_tokens",
    "mm_cache_queries": "item_queries",
    "mm_cache_hits": "item_hits",
    "num_preemptions": "preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generated_tokens",
    "request_success": "requests_finished",
}
"""vLLM's names and the keys of `shmllm.LLM.get_metrics`."""
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""The same, for an engine that drafts tokens. Others do not have them."""


def as_metrics(values: Mapping[str, int], model: str) -> list[Metric]:
    """The Metric objects for the values that an engine counts."""
    labels = {"model_name": model, "engine": "0"}
    usage = values["kv_blocks_used"] / max(values["kv_blocks_total"], 1)
    num_own = values["prefix_hit_tokens"] - values["shared_hit_tokens"]
    values = {**values, "prefix_hit_tokens": num_own}  # in vLLM they are those of its own cache
    counters, num_places = dict(COUNTERS), values.get("num_speculative_tokens", 0)
    vectors = {}
    if num_places:
        counters |= DRAFT_COUNTERS
        vectors["spec_decode_num_accepted_tokens_per_pos"] = [
            values[f"accepted_at_{place}"] for place in range(num_places)
        ]
    return [
        *(Gauge(f"vllm:{name}", dict(labels), float(values[key])) for name, key in GAUGES.items()),
        Gauge("vllm:kv_cache_usage_perc", dict(labels), usage),
        *(Counter(f"vllm:{name}", dict(labels), values[key]) for name, key in counters.items()),
        *(Vector(f"vllm:{name}", dict(labels), counts) for name, counts in vectors.items()),
    ]
