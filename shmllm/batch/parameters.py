"""Makes sampling parameters from JSON values."""

from __future__ import annotations

from typing import Any

from shmllm.batch.rows import JsonObject
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams

SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
"""The names of all sampling parameters."""

# A batch file has one record per row, with the complete text, so these have no meaning.
_NOT_FOR_FILES = ("output_kind", "stream_interval")


def make_params(defaults: JsonObject, given: JsonObject) -> SamplingParams:
    """Makes the sampling parameters of a row.

    Args:
        defaults: keyword arguments of `SamplingParams`.
        given: the row's own parameters, which override the defaults.

    Raises:
        RequestError: a name is unknown, or `SamplingParams` refuses a value.
    """
    for name in _NOT_FOR_FILES:
        if name in given:
            raise RequestError(f"{name} is not for batch files: a row has one record")
    options: dict[str, Any] = defaults | given
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise RequestError(str(error)) from error
