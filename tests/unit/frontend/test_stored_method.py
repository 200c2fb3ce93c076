"""The option `quantization` with vLLM's names of what a checkpoint is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.gguf_models import write_model
from support.model_helpers import reference_model

from shmllm.config.load import LoadConfig
from shmllm.config.quantization import STORED_METHODS
from shmllm.errors import EngineStartError
from shmllm.frontend.model_files import bundled_model
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.models.quantization_methods import METHODS

BUNDLED = bundled_model("tiny")


def checkpoint(directory: Path, quantization: dict[str, Any] | None) -> str:
    """A directory whose config.json says that it is quantized."""
    directory.mkdir()
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(BUNDLED / "tokenizer.json", directory / "tokenizer.json")
    (directory / "model.safetensors").touch()
    return str(directory)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, str]:
    """A checkpoint of each method."""
    model = write_model(tmp_path / "m.gguf", reference_model("llama"), kind="F16")
    made = {each: checkpoint(tmp_path / each, {"quant_method": each}) for each in METHODS}
    return made | {"gguf": str(model)}


def test_each_name_is_taken_for_its_checkpoints_only(stored: dict[str, str]) -> None:
    assert set(STORED_METHODS.values()) == set(stored)
    for name, method in STORED_METHODS.items():
        for other, model in stored.items():
            if other == method:
                load = make_engine_config(model, quantization=name).load
                assert (load.quantization, load.rounding) == (name, None)
                continue
            with pytest.raises(EngineStartError) as problem:
                make_engine_config(model, quantization=name)
            words = f"quantization={name!r} says that the checkpoint is stored so, but {model} is "
            found = "a GGUF file" if other == "gguf" else f"quantized with {other}"
            assert str(problem.value) == f"{words}{found}; leave the option out"


@pytest.mark.parametrize("name", STORED_METHODS)
def test_a_checkpoint_that_is_not_quantized_is_refused(name: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", None)
    with pytest.raises(EngineStartError, match=f"^quantization='{name}'.* not quantized; .*int8"):
        make_engine_config(model, quantization=name)
    assert make_engine_config(model, quantization="int8").load.rounding == "int8"


def test_a_checkpoint_of_any_method_can_be_rounded(stored: dict[str, str]) -> None:
    for model in stored.values():
        assert make_engine_config(model, quantization="int4").load.rounding == "int4"


def test_without_the_option_nothing_is_rounded() -> None:
    assert LoadConfig("m").rounding is None
