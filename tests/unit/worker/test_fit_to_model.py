"""Options that a model's layers do not allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.reference_models import make_model

from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.errors import EngineStartError
from shmllm.worker.fit_to_model import fit_to_model


def test_adapters_of_layers_that_share_weights_are_refused(tmp_path: Path) -> None:
    make_model("zamba2", tmp_path)
    load = LoadConfig(directory=str(tmp_path))
    plain = EngineConfig(load=load)
    assert fit_to_model(plain) == plain
    with pytest.raises(EngineStartError, match="enable_lora is not possible for Zamba2ForCausalLM"):
        fit_to_model(EngineConfig(load=load, lora=LoraConfig(enable_lora=True)))


@pytest.mark.parametrize("family", ["beam", "hy_v4"])
def test_heads_that_read_one_plain_residual_stream_are_refused(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    head = {"model_type": "medusa", "vocab_size": 9, "hidden_size": model.config.hidden_size}
    (tmp_path / "config.json").write_text(json.dumps(head | {"num_heads": 3}))
    config = EngineConfig(
        load=LoadConfig(directory=str(tmp_path / "model")),
        speculative=SpeculativeConfig(method="medusa", model_directory=str(tmp_path)),
    )
    with pytest.raises(EngineStartError, match="method 'medusa' is not possible for"):
        fit_to_model(config)
