"""The bytes and parameters of the measured models of other families, against transformers'."""

from __future__ import annotations

import pytest
from gpu.families import FAMILIES
from support.model_sizes import num_allocated, theirs_on_meta

from shmllm.models.config import ModelConfig


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_of_parameters_are_those_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    directory = family.write(tmp_path, "bfloat16")
    config = ModelConfig.from_directory(directory)
    theirs = theirs_on_meta(directory)
    assert num_allocated(directory) == theirs.num_parameters() == family.num_parameters
    assert len(config.mixtures) == (family.expert_layers > 0)
    assert sum(layer.mlp in config.mixtures for layer in config.layers) == family.expert_layers
    kept = [mixer.kv for mixer in config.mixers if mixer.kv is not None]
    assert family.kv_elements == sum(each.count * (each.key_dim + each.value_dim) for each in kept)
    states = [mixer.state_bytes for mixer in config.mixers if mixer.kv is None]
    assert family.state_bytes == sum(states)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rehearsal_has_a_small_model_of_the_same_kind(name, tmp_path):
    family = FAMILIES[name]
    directories = (
        family.shrunk().write(tmp_path / "small", "float32"),
        family.write(tmp_path / "whole", "bfloat16"),
    )
    config, whole = map(ModelConfig.from_directory, directories)
    kinds = {type(mixer) for mixer in config.mixers}
    assert kinds == {type(mixer) for mixer in whole.mixers}
    assert config.hidden_size == 64
    assert len(config.mixtures) == len(whole.mixtures)


def test_the_bytes_of_a_decode_step():
    """Qwen3-30B-A3B has 3.3 billion active parameters, of which 0.3 are the table of embeddings."""
    family = FAMILIES["mixture"]
    one = family.decode_bytes(1, 1000, 2)
    active = 30_532_122_624 - 48 * 120 * 3 * 2048 * 768 - 151_936 * 2048
    assert one == 2 * active + 1000 * 2 * 49_152
    assert 1.5 * one < family.decode_bytes(8, 1000, 2) < 8 * one
    states = FAMILIES["recurrent"].state_bytes
    assert FAMILIES["mamba"].decode_bytes(1, 1000, 2) == (
        2 * (7_272_665_088 - 65_024 * 4096) + 2 * FAMILIES["mamba"].state_bytes
    )
    both = [FAMILIES["recurrent"].decode_bytes(batch, 0, 2) for batch in (1, 2)]
    assert both[1] - both[0] > 2 * states
    assert family.decode_bytes(10**6, 0, 2) == pytest.approx(2 * (30_532_122_624 - 151_936 * 2048))
