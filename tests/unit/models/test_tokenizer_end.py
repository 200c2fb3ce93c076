"""The end-of-sequence token of models whose own files name none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shmllm import LLM, EngineStartError
from shmllm.frontend.model_files import bundled_model
from shmllm.models.tokenizer_end import end_of_tokenizer

ADDED = {"added_tokens": [{"id": 5, "content": "</s>"}]}
DECODER = {"added_tokens_decoder": {"9": {"content": "</s>"}, "x": {"content": "</s>"}}}


def write(directory: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer": ADDED}, None),
        ({"tokenizer_config": {"eos_token": "</s>"}}, None),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": ADDED}, 5),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}, "tokenizer": ADDED}, 5),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer": ADDED}, 5),
        (
            {
                "tokenizer_config": {"eos_token": None},
                "special_tokens_map": {"eos_token": "</s>"},
                "tokenizer": ADDED,
            },
            None,
        ),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"},
                "tokenizer": {"model": {"vocab": {"</s>": 7}}},
            },
            7,
        ),
        ({"tokenizer_config": {"eos_token": "</s>"} | DECODER}, 9),
        ({"tokenizer_config": {"eos_token": "</s>"} | DECODER, "tokenizer": ADDED}, 5),
        (
            {
                "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": []},
                "tokenizer": {"added_tokens": [3], "model": {"vocab": [["</s>", -1.0]]}},
            },
            None,
        ),
    ],
)
def test_the_id_is_that_of_the_files(
    files: dict[str, Any], expected: int | None, tmp_path: Path
) -> None:
    assert end_of_tokenizer(write(tmp_path, **files)) == expected


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(EngineStartError, match=r"tokenizer_config\.json is not valid JSON"):
        end_of_tokenizer(tmp_path)


def without_ends(directory: Path) -> Path:
    """A copy of the bundled model whose config.json and generation_config.json have no ids."""
    shutil.copytree(bundled_model("tiny"), directory)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text(encoding="utf-8"))
        del values["eos_token_id"]
        (directory / name).write_text(json.dumps(values), encoding="utf-8")
    return directory


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_model_without_ids_has_the_tokenizer_s(model_impl: str, tmp_path: Path) -> None:
    directory = without_ends(tmp_path / "model")
    with LLM(str(directory), multiprocess=False, model_impl=model_impl) as llm:
        assert llm.facts.eos_token_ids == (0,)


def test_the_ids_of_the_model_come_before_the_tokenizer_s(tmp_path: Path) -> None:
    directory = without_ends(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write(directory, config=config | {"eos_token_id": 2})
    with LLM(str(directory), multiprocess=False) as llm:
        assert llm.facts.eos_token_ids == (2,)
    write(directory, config=config)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write(directory, tokenizer_config=settings | {"eos_token": None})
    with LLM(str(directory), multiprocess=False) as llm:
        assert llm.facts.eos_token_ids == ()
