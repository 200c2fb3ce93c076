"""Checks the defaults of a family's fields: those of transformers' configuration class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmllm.models.config import ModelConfig


def assert_absent_fields_agree(
    directory: Path, architecture: str, given: dict[str, Any], written: Any
) -> None:
    """Check that few fields mean what transformers writes.

    Args:
        directory: gets the files.
        architecture: the name of the architecture.
        given: the few fields.
        written: transformers' configuration of these fields, which writes all of them.
    """
    read = []
    for name, fields in (("few", given), ("all", written.to_dict())):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(
            json.dumps(fields | {"architectures": [architecture]})
        )
        read.append(ModelConfig.from_directory(directory / name))
    few, every = read
    assert replace(few, eos_token_ids=every.eos_token_ids) == every
