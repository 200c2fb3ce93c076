"""The numbers of the control segment: counters, gauges, start times, histograms and step fields.

This module owns their order, which is a part of the layout: a new member goes to the end of its
enum, and no member ever gets another number. `layout` holds the offsets.
"""

from __future__ import annotations

from enum import IntEnum


class Stat(IntEnum):
    """Index into the page of statistics words. Append; never renumber."""

    STEPS = 0
    RUNNING = 1
    WAITING = 2
    KV_BLOCKS_TOTAL = 3
    KV_BLOCKS_USED = 4
    PREFIX_QUERY_TOKENS = 5
    PREFIX_HIT_TOKENS = 6
    PREEMPTIONS = 7
    PROMPT_TOKENS = 8
    GENERATED_TOKENS = 9
    REQUESTS_FINISHED = 10
    STEP_NS = 11
    WEIGHT_BYTES_LOADED = 12
    WEIGHT_BYTES_TOTAL = 13
    TIMES_PARKED = 14
    DRAIN_NS = 15
    SCHEDULE_NS = 16
    EXECUTE_NS = 17
    APPLY_NS = 18
    PUBLISH_NS = 19
    PAUSED = 20
    PREPARE_NS = 21
    SAMPLE_NS = 22
    ASLEEP = 23
    GRAPHS_CAPTURED = 24
    GRAPHS_TOTAL = 25
    NUM_SPECULATIVE_TOKENS = 26
    DRAFTS = 27
    DRAFT_TOKENS = 28
    ACCEPTED_TOKENS = 29
    DRAFT_BREAK_EVEN = 30
    STOPPED_RANK = 31
    SHARED_KV_CACHE_BYTES = 32
    SHARED_QUERY_TOKENS = 33
    SHARED_HIT_TOKENS = 34
    SHARED_BLOCKS_LENT = 35
    SHARED_BLOCKS_SAVED = 36
    SHARED_BLOCKS_REUSED = 37
    ITEM_QUERIES = 38
    ITEM_HITS = 39


class Mark(IntEnum):
    """Index into the times of the events of an engine's start, on CLOCK_MONOTONIC in ns; a time
    is 0 before its event. Append; never renumber."""

    STARTED = 0
    IMPORTED = 1
    READY = 2


class Histogram(IntEnum):
    """Index into the histograms of durations. Append; never renumber."""

    TTFT = 0
    ITL = 1
    STEP = 2


class StepField(IntEnum):
    """Index into the words of a step's record. Append; never renumber."""

    BEGAN_NS = 0
    DRAIN_NS = 1
    SCHEDULE_NS = 2
    PREPARE_NS = 3
    EXECUTE_NS = 4
    SAMPLE_NS = 5
    APPLY_NS = 6
    PUBLISH_NS = 7
    NUM_TOKENS = 8
    NUM_REQUESTS = 9
    NUM_SAMPLED = 10
    NUM_FIRST = 11
    DEVICE_NS = 12
    NUM_DRAFT_TOKENS = 13
    NUM_ACCEPTED_TOKENS = 14


PHASES = ("drain", "schedule", "prepare", "execute", "sample", "apply", "publish")
"""The phases of a step, in order. Each has a Stat and a StepField with the suffix _NS."""
