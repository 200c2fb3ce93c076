"""The option `speculative_config`: its keys, what they mean, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from shmllm.config.speculative import SpeculativeConfig
from shmllm.errors import EngineStartError
from shmllm.frontend.model_files import bundled_model
from shmllm.frontend.options import speculative
from shmllm.frontend.options.engine_args import EngineArgs
from shmllm.frontend.options.engine_options import read_llm_options
from shmllm.frontend.options.speculative import SHORT_NAMES, read_speculative_config


@pytest.mark.parametrize("given", [None, {}, {"method": None}])
def test_nobody_drafts_without_a_method(given: Any) -> None:
    config = read_speculative_config(given)
    assert config == SpeculativeConfig()
    assert config.most_drafted == 0


@pytest.mark.parametrize(
    ("given", "shortest", "longest"),
    [({}, 2, 5), ({"max": 4}, 4, 4), ({"min": 3}, 3, 3), ({"min": 1, "max": 6}, 1, 6)],
)
def test_ngram_has_the_bounds_of_vllm(given: dict[str, int], shortest: int, longest: int) -> None:
    keys = {f"prompt_lookup_{name}": value for name, value in given.items()}
    config = read_speculative_config({"method": "ngram", **keys})
    assert (config.lookup_min, config.lookup_max) == (shortest, longest)
    assert config.most_drafted == 8


def test_vllm_s_names_for_layers_of_families_mean_mtp() -> None:
    assert read_speculative_config({"method": "deepseek_mtp"}).method == "mtp"


def test_a_model_drafts_from_its_directory() -> None:
    config = read_speculative_config({"model": "tiny", "num_speculative_tokens": 2})
    assert (config.method, config.model, config.most_drafted) == ("draft_model", "tiny", 2)
    assert config.model_directory == str(bundled_model("tiny").absolute())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ngram", "must be a mapping such as"),
        ({"method": "eagle"}, "method 'eagle' needs a model"),
        (
            {"method": "extract_hidden_states", "draft_model_config": {}},
            "has those behind the last one",
        ),
        ({"method": "hydra"}, "method 'hydra' is not one of None, ngram, suffix, draft_model, mtp"),
        ({"num_speculative_tokens": 3}, "needs a method, or a model that drafts"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "at most 32, got 33"),
        ({"method": "ngram", "model": "tiny"}, "method 'ngram' takes no model"),
        ({"method": "draft_model"}, "method 'draft_model' needs a model"),
        ({"method": "pard", "model": "tiny"}, "drafts by method 'draft_model': leave out 'pard'"),
        ({"method": "ngram", "parallel_drafting": True}, "is for heads, not for method 'ngram'"),
        ({"method": "ngram", "prompt_lookup_man": 3}, "the nearest is 'prompt_lookup_min'"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "at most"),
        ({"model": "./ngarm/x/"}, "model './ngarm/x/' not found"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "can only be 1"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [(1, 2, 3)]}, "adaptive"),
    ],
)
def test_what_is_wrong_is_one_error(given: Any, words: str) -> None:
    with pytest.raises(EngineStartError) as caught:
        read_speculative_config(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"), [("ngarm", "no ngarm; the nearest method is 'ngram'"), ("org/x", "no org/x")]
)
def test_a_model_that_is_not_found_may_be_a_method(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none(name: str, hub: object) -> Path:
        raise EngineStartError(f"no {name}")

    monkeypatch.setattr(speculative, "resolve_model", find_none)
    with pytest.raises(EngineStartError) as caught:
        read_speculative_config({"model": name})
    assert str(caught.value) == f"speculative_config: {said}"


def test_keys_without_effect_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_speculative_config({"method": "ngram", "rejection_sample_method": "strict"})
    assert "rejection_sample_method has no effect" in caplog.text


def read(**options: Any) -> SpeculativeConfig:
    return read_llm_options("LLM", "tiny", options)[1].speculative


def test_short_names_are_keys_of_the_configuration() -> None:
    wanted = read(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert read(spec_method="ngram", spec_tokens=3) == wanted
    assert read(speculative_config={"method": "ngram"}, spec_tokens=3) == wanted
    assert read(speculative_config={"method": "ngram", "model": None}, spec_tokens=3) == wanted
    assert read(spec_model="tiny", spec_tokens=2) == read(
        speculative_config={"model": "tiny", "num_speculative_tokens": 2}
    )
    assert read(**dict.fromkeys(SHORT_NAMES)) == SpeculativeConfig()
    assert EngineArgs(spec_method="ngram").llm_options() == {"spec_method": "ngram"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"speculative_config": {"method": "ngram"}, "spec_method": "suffix"},
            "spec_method is given twice, here and as 'method' of speculative_config",
        ),
        ({"speculative_config": "ngram", "spec_tokens": 2}, "must be a mapping such as"),
        ({"spec_tokens": 2}, "needs a method, or a model that drafts"),
        ({"spec_method": "ngram", "spec_tokens": 0}, "num_speculative_tokens must be"),
    ],
)
def test_short_names_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        read(**options)
