"""outlines' `from_vllm_offline` on shmllm returns outputs of the requested type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.client_helpers import needs
from support.reference_models import make_model

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "vllm_is_shmllm"),
    needs("outlines"),
]

PROMPTS = ["def add(a, b):", "Who are you?", "x", "{", "\n\n"]
NUM_SEEDS = 6
Colour = Literal["red", "green", "ultramarine", 'a "quoted" one']


class Closed(BaseModel):
    """No other properties: random weights would never stop to invent some."""

    model_config = ConfigDict(extra="forbid")


class Pet(Closed):
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=40)]


class Person(Closed):
    name: Annotated[str, Field(min_length=1, max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]
    is_member: bool
    pets: Annotated[list[Pet], Field(max_length=2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", path)
    return path


@pytest.fixture
def model(directory: Path, vllm_is_shmllm: None) -> Iterator[Any]:
    import outlines
    from vllm import LLM

    llm = LLM(model=str(directory), kv_cache_memory_bytes=2**27, gpu_memory_utilization=0.1)
    try:
        yield outlines.from_vllm_offline(llm)
    finally:
        llm.close()


def outputs(model: Any, output_type: Any, max_tokens: int) -> list[str]:
    """The completions of every prompt with every seed."""
    from vllm import SamplingParams

    texts = []
    for seed in range(NUM_SEEDS):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens)
        batch = model.batch(PROMPTS, output_type, sampling_params=params)
        texts += [text for (text,) in batch]
    assert len(texts) == NUM_SEEDS * len(PROMPTS)
    return texts


def test_a_pydantic_model(model: Any) -> None:
    people = [Person.model_validate_json(text) for text in outputs(model, Person, 600)]
    assert len({person.name for person in people}) > len(people) / 2  # weights decide


def test_a_literal(model: Any) -> None:
    texts = outputs(model, Colour, 32)
    assert set(texts) <= set(get_args(Colour))
    assert len(set(texts)) > 1


def test_an_int(model: Any) -> None:
    numbers = [int(text) for text in outputs(model, int, 8)]
    assert len(set(numbers)) > 1


def test_a_regex_and_one_prompt(model: Any) -> None:
    import outlines
    from vllm import SamplingParams

    pattern = r"[a-f]{3}-[0-9]{2,5}"
    params = SamplingParams(temperature=1, seed=1, max_tokens=32)
    text = model(PROMPTS[0], outlines.regex(pattern), sampling_params=params)
    assert re.fullmatch(pattern, text)


def test_parameters_besides_the_type_survive(model: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1, seed=1, max_tokens=8, n=3)
    texts = model(PROMPTS[0], int, sampling_params=params)
    assert len(texts) == 3
    assert all(isinstance(int(text), int) for text in texts)
    assert params.structured_outputs is None


def test_text_without_a_type(model: Any, directory: Path) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8)
    (expected,) = model.model.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
    assert model("x", sampling_params=params) == expected.outputs[0].text
