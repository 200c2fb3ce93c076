"""Reads the JSON that a model writes, and writes arguments of calls: JSON as the standard has it.

Python's json also reads and writes NaN, infinities and unpaired surrogates, which other readers of
the arguments refuse. This module must not know formats of calls.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn


def read_json(text: str) -> Any:
    """The value of a text, with the largest float in place of a larger number.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    return DECODER.decode(text)


def write_json(value: Any) -> str:
    """The text of a value that `read_json` returned."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which only an escape can express
        return json.dumps(value)
    return text


def finite(text: str) -> float:
    """The number of a text; the largest float in place of a larger one."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_float=finite, parse_constant=_refuse)
