"""The models that end-to-end tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from support.forked_engines import forked_engines
from support.reference_models import (
    VARIANTS,
    ReferenceModel,
    make_model,
    make_prompts,
)

from shmllm.frontend.model_files import resolve_model


@pytest.fixture(scope="module", autouse=True)
def starts() -> Iterator[None]:
    """Engines of these tests start by fork."""
    with forked_engines():
        yield


@pytest.fixture(scope="session", params=[*VARIANTS, "tiny"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> ReferenceModel:
    if request.param == "tiny":
        directory = resolve_model("tiny")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        directory = tmp_path_factory.mktemp(request.param)
        model = make_model(request.param, directory)
    prompts = make_prompts(model.config.vocab_size)
    return ReferenceModel(model, directory, prompts)
