"""Measures sleep, wake-up and weight updates of an engine, as a trainer on the same GPU uses them.

Times are from the call to its return, in the front end's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from gpu.settings import Settings
from gpu.shapes import Shape
from shmllm import LLM, SamplingParams

TOKENS = 8
DEVIATION = 0.02
"""The standard deviation of the weights, that of an engine with random weights."""


def measure_sleep(llm: LLM, settings: Settings) -> dict[str, Any]:
    """Measures sleep(level=1) and wake_up.

    Returns:
        bytes, the size of the weights; sleep_s and wake_s, medians; sleeps_s and wakes_s, all.

    Raises:
        AssertionError: the engine generates other tokens than before.
    """
    wanted = _tokens(llm, settings)
    sleeps, wakes = [], []
    for _ in range(settings.sleep_rounds):
        sleeps.append(_seconds(lambda: llm.sleep(level=1)))
        wakes.append(_seconds(llm.wake_up))
        found = _tokens(llm, settings)
        assert found == wanted, f"other tokens after sleep and wake-up: {wanted}, then {found}"
    return {
        "bytes": llm.facts.weight_bytes,
        "sleep_s": median(sleeps),
        "wake_s": median(wakes),
        "sleeps_s": sleeps,
        "wakes_s": wakes,
    }


def measure_updates(llm: LLM, settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measures `update_weights` with tensors on the engine's device.

    Before, the engine gives up its weights and its KV cache, as it does beside a trainer: the
    tensors need the room.

    Returns:
        bytes; update_s, the median; updates_s, all.

    Raises:
        AssertionError: the engine generates the same tokens as with its old weights.
    """
    before = _tokens(llm, settings)
    llm.sleep(level=2)
    weights = make_weights(shape, settings)
    llm.wake_up(tags=["weights"])
    times = [_seconds(lambda: llm.update_weights(weights)) for _ in range(settings.sleep_rounds)]
    num_bytes = sum(weight.nbytes for weight in weights.values())
    weights.clear()
    _release(settings)
    llm.wake_up()
    assert _tokens(llm, settings) != before, "the engine has its old weights"
    return {"bytes": num_bytes, "update_s": median(times), "updates_s": times}


def make_weights(shape: Shape, settings: Settings) -> dict[str, Any]:
    """Returns random weights of a model on the device, by their names in a checkpoint. The norms
    are negative, so that the most likely token becomes the least likely one."""
    import torch  # a front end imports it only for tensors

    generator = torch.Generator(settings.device).manual_seed(1)
    dtype = getattr(torch, settings.dtype)
    made = {}
    for name, size in shape.weights().items():
        weight = torch.empty(size, device=settings.device, dtype=dtype)
        is_norm = len(size) == 1
        if is_norm:
            weight.fill_(-1)
        else:
            weight.normal_(0, DEVIATION, generator=generator)
        made[name] = weight
    if settings.device == "cuda":
        torch.cuda.synchronize()
    return made


def _release(settings: Settings) -> None:
    """Gives the memory of freed tensors back to the device."""
    if settings.device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _tokens(llm: LLM, settings: Settings) -> list[int]:
    prompts = settings.prompts(1, settings.compare_prompt, llm.facts.vocab_size, 7)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    [output] = llm.generate(prompts, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)
