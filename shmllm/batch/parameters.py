"""Sampling parameters from JSON."""

from __future__ import annotations

from typing import Any

from shmllm.batch.rows import JsonObject
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams

# A batch file has one record for each row, of the finished text.
_NOT_FOR_FILES = ("output_kind", "stream_interval")


def make_params(defaults: JsonObject, given: JsonObject) -> SamplingParams:
    """Parameters of a row.

    Args:
        defaults: by name, as for `SamplingParams`.
        given: the row's own, which win.

    Raises:
        RequestError: an unknown name, or a value that `SamplingParams` refuses.
    """
    for name in _NOT_FOR_FILES:
        if name in given:
            raise RequestError(f"{name} is not for batch files: a row has one record")
    options: dict[str, Any] = defaults | given
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise RequestError(str(error)) from error
