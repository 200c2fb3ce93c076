"""The ranges of the fields of PoolingParams and PoolerConfig, and the errors about others."""

from __future__ import annotations

import math
from typing import Any

from shmllm.errors import RequestError


def check_choice(parameter: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise RequestError unless the value is None or one of the choices."""
    if value is not None and value not in choices:
        allowed = ", ".join(choices)
        raise RequestError(
            f"{parameter} must be None or one of {allowed}, got {value!r}",
            parameter=parameter,
            value=value,
        )


def check_fields(values: Any) -> None:
    """Check the fields that PoolerConfig and PoolingParams have, those that `values` has.

    Raises:
        RequestError: a field is out of its range. The message contains the field, its value and
            the range.
    """
    for name, (is_valid, allowed) in _RANGES.items():
        value = getattr(values, name, None)
        if value is not None and not is_valid(value):
            raise RequestError(
                f"{name} must be None or {allowed}, got {value!r}", parameter=name, value=value
            )


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_id, value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


_FLAG = (_is_flag, "True or False")
_SIZE = (_is_size, "a whole number of at least 1")
_NUMBER = (_is_number, "a finite number")
_RANGES = {
    "use_activation": _FLAG,
    "skip_reading_prefix_cache": _FLAG,
    "requires_token_ids": _FLAG,
    "enable_chunked_processing": _FLAG,
    "enable_flash_late_interaction": _FLAG,
    "dimensions": _SIZE,
    "max_embed_len": _SIZE,
    "logit_mean": _NUMBER,
    "logit_sigma": _NUMBER,
    "step_tag_id": (_is_id, "a token id"),
    "returned_token_ids": (_are_ids, "a list of whole numbers"),
}
