"""Makes sampling parameters from JSON values, and seeds from line numbers."""

from __future__ import annotations

import hashlib
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


def seed_of(line: int) -> int:
    """The seed of a row without one: the same in a whole, a resumed and a divided job.

    Args:
        line: the row's line number.

    Returns:
        A hash from 0 to 2**63 - 1. Completion i of a row has this seed plus i, so those of
        neighbouring lines must be far apart.
    """
    digest = hashlib.blake2b(b"line %d" % line, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
