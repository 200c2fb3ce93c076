"""An engine in the caller's process gives its memory back with the last reference to it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from shmllm import LLM, SamplingParams, StructuredOutputsParams
from shmllm.worker.cpu.arena import HostArena

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def count_arenas() -> int:
    return sum(isinstance(each, HostArena) for each in gc.get_objects())


PLAIN = SamplingParams(max_tokens=4)
CONSTRAINED = SamplingParams(
    max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z ]*")
)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, PLAIN),
        ({"enable_lora": True}, PLAIN),
        ({"speculative_config": NGRAM}, PLAIN),
        ({}, CONSTRAINED),
    ],
)
def test_no_memory_waits_until_cycles_are_collected(
    options: dict[str, Any], params: SamplingParams, is_closed: bool
) -> None:
    gc.collect()
    before = count_arenas()
    gc.disable()
    try:
        llm = LLM("tiny", multiprocess=False, kv_cache_memory_bytes=2**26, **options)
        llm.generate("to be or", params, use_tqdm=False)
        assert count_arenas() > before
        if is_closed:
            llm.close()
        del llm
        assert count_arenas() == before
    finally:
        gc.enable()
