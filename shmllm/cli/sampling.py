"""The sampling parameters of `shmllm generate`: options of the command line, and defaults."""

from __future__ import annotations

from typing import Any

# The model's generation_config.json overrides these, and options override both.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 128}
SAMPLING_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "logprobs",
)


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the command's options.

    Raises:
        RequestError: a value is invalid. This is found before the engine starts.
    """
    from shmllm.params.sampling import SamplingParams

    sampling = {n: options[n] for n in SAMPLING_NAMES if options[n] is not None}
    sampling |= {"stop": list(options["stop"])} if options["stop"] else {}
    SamplingParams(**sampling)
    return sampling
