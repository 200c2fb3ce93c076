"""Options that a model's layers do not allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reference_models import make_model

from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.errors import EngineStartError
from shmllm.worker.fit_to_model import fit_to_model


def test_adapters_of_layers_that_share_weights_are_refused(tmp_path: Path) -> None:
    make_model("zamba2", tmp_path)
    load = LoadConfig(directory=str(tmp_path))
    plain = EngineConfig(load=load)
    assert fit_to_model(plain) == plain
    with pytest.raises(EngineStartError, match="enable_lora is not possible for Zamba2ForCausalLM"):
        fit_to_model(EngineConfig(load=load, lora=LoraConfig(enable_lora=True)))
