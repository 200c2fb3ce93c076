"""Families that other packages register: their names are checked, and errors are one line."""

from __future__ import annotations

import pytest

from shmllm.errors import EngineStartError
from shmllm.models import registry
from shmllm.models.families import llama


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", {})


@pytest.mark.parametrize("name", ["shmllm.models.families.llama", "shmllm.models.families:llama"])
def test_a_family_is_a_module_or_an_object(name: str) -> None:
    import shmllm.models.families.llama  # noqa: F401

    registry.register_model("OwnForCausalLM", name)
    assert registry.find_family("OwnForCausalLM") is llama


@pytest.mark.parametrize("name", ["", ":", "a:", ":b", "a:b:c", None, object])
def test_a_name_of_another_form_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="'module' or 'module:object'"):
        registry.register_model("OwnForCausalLM", name)  # type: ignore[arg-type]


def test_our_own_architectures_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM is an architecture"):
        registry.register_model("LlamaForCausalLM", "shmllm.models.families.llama")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent_package", "cannot be imported: ModuleNotFoundError"),
        ("json:absent", "cannot be imported: AttributeError"),
        ("json", "has no configure"),
    ],
)
def test_a_family_that_is_none_is_an_error_of_one_line(name: str, message: str) -> None:
    registry.register_model("OwnForCausalLM", name)
    with pytest.raises(EngineStartError, match=message) as refusal:
        registry.find_family("OwnForCausalLM")
    assert "\n" not in str(refusal.value)


def test_a_registered_architecture_is_one_of_the_nearest() -> None:
    registry.register_model("OwnForCausalLM", "shmllm.models.families.llama")
    with pytest.raises(EngineStartError, match="OwnForCausalLM"):
        registry.find_family("OwnForCausalLn")
