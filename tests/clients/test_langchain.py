"""LangChain's `VLLM` class on shmllm returns `LLM`'s texts and outputs of the requested type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from support.client_helpers import needs
from support.reference_models import make_model

from shmllm import SamplingParams

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "vllm_is_shmllm"),
    needs("langchain_community"),
]

PROMPTS = ["def add(a, b):", "Who are you?", "x", "{", "\n\n"]
NUM_SEEDS = 6


class Answer(BaseModel):
    """No other properties: random weights would never stop to invent some."""

    model_config = ConfigDict(extra="forbid")

    word: Annotated[str, Field(min_length=1, max_length=12)]
    score: Annotated[int, Field(ge=0, le=10)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


@pytest.fixture
def model(directory: Path, vllm_is_shmllm: None) -> Iterator[Any]:
    from langchain_community.llms import VLLM

    model = VLLM(
        model=str(directory),
        trust_remote_code=True,
        max_new_tokens=16,
        temperature=0,
        vllm_kwargs={"kv_cache_memory_bytes": 2**27, "gpu_memory_utilization": 0.1},
    )
    try:
        yield model
    finally:
        model.client.close()


def test_texts_are_those_of_the_engine(model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = [o.outputs[0].text for o in model.client.generate(PROMPTS, params)]
    assert model.batch(PROMPTS) == expected
    assert [model.invoke(prompt) for prompt in PROMPTS[:2]] == expected[:2]
    result = model.generate(PROMPTS)
    assert [generation.text for (generation,) in result.generations] == expected


def test_options_of_a_call_go_through(model: Any) -> None:
    text = model.invoke(PROMPTS[0])
    short = model.invoke(PROMPTS[0], max_tokens=2)
    assert len(short) < len(text)
    assert text.startswith(short)
    stop = text[5]
    assert model.invoke(PROMPTS[0], stop=[stop]) == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("output_type", "max_tokens"),
    [(Answer, 400), (Literal["yes", "no", "perhaps"], 16), (int, 8)],
    ids=["pydantic", "literal", "int"],
)
def test_outputs_are_of_the_type(model: Any, output_type: Any, max_tokens: int) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    adapter = TypeAdapter(output_type)
    values = []
    for seed in range(NUM_SEEDS):
        texts = model.batch(
            PROMPTS,
            temperature=1.5,
            seed=seed,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=adapter.json_schema()),
        )
        values += [adapter.validate_json(text) for text in texts]
    assert len(values) == NUM_SEEDS * len(PROMPTS)
    assert len(set(map(repr, values))) > 1
