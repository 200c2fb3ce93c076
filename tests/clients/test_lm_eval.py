"""lm-evaluation-harness: its `vllm` model class on shmllm gives the results of its `hf` class.

The tasks come from local files and cover its three kinds of requests: multiple choice, perplexity
of a text, and generation with stop strings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.client_helpers import needs

from shmllm import LLM, SamplingParams
from shmllm.frontend.model_files import resolve_model

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "vllm_is_shmllm"),
    needs("lm_eval"),
]

LOGLIKELIHOOD_TOLERANCE = 1e-3
PROLOGUE = "import os\nimport sys\n\n\n"
CONTEXTS = [
    "def add(a, b):\n    return",
    "import os\nimport",
    "class Stack:\n    def __init__(self):\n        self.",
    "for index, value in enumerate(",
    "x",
    PROLOGUE + "def main(argv):\n    if len(argv) < 2:\n        raise" * 12,
]
CHOICES = [" None", " a + b", " sys\n", "items", "items = []\n        self.", " ValueError("]
STOPS = ["\n\n", "return"]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": CHOICES,
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "completions": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": STOPS, "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "bypass"}],
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "two at once": {"max_num_seqs": 2},
    "budget under the prompt": {"max_num_batched_tokens": 32},
    "one after the other": {"batch_size": 1, "max_num_seqs": 1},
}


OWN_CLASS = "shmllm.LLM without the replacement's"


@dataclass
class Answers:
    """The answers of a model: (log-likelihood, is greedy) of each choice, and texts."""

    choices: list[tuple[float, bool]]
    perplexities: list[float]
    texts: list[str]


def write_tasks(directory: Path) -> Path:
    directory.mkdir()
    data = directory / "contexts.jsonl"
    data.write_text("".join(json.dumps({"context": text}) + "\n" for text in CONTEXTS))
    for name, task in TASKS.items():
        config = task | {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(directory / "cache"),
            },
            "test_split": "test",
        }
        (directory / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return directory


def evaluate(model: Any, tasks: Path) -> Answers:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(
        model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    assert results is not None
    said = {
        name: [answer for sample in samples for (answer,) in sample["resps"]]
        for name, samples in results["samples"].items()
    }
    return Answers(
        [(float(value), greedy) for value, greedy in said["choices"]],
        [float(value) for value in said["perplexity"]],
        said["completions"],
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("lm_eval") / "tasks")


@pytest.fixture(scope="module")
def reference(tasks: Path) -> Answers:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(resolve_model("tiny")), dtype="float32", device="cpu", batch_size=1)
    return evaluate(model, tasks)


def test_the_tasks_tell_models_apart(reference: Answers) -> None:
    assert {greedy for _, greedy in reference.choices} == {True, False}
    assert len(set(reference.texts)) == len(CONTEXTS)
    assert any(text.strip() for text in reference.texts)


@pytest.mark.parametrize("variant", [*VARIANTS, OWN_CLASS])
def test_answers_are_those_of_transformers(
    variant: str, tasks: Path, reference: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models import vllm_causallms
    from lm_eval.models.vllm_causallms import VLLM

    if variant == OWN_CLASS:
        monkeypatch.setattr(vllm_causallms, "LLM", LLM)
        monkeypatch.setattr(vllm_causallms, "SamplingParams", SamplingParams)
    model = VLLM(
        pretrained=str(resolve_model("tiny")), dtype="float32", **VARIANTS.get(variant, {})
    )
    try:
        ours = evaluate(model, tasks)
    finally:
        model.model.close()
    assert ours.texts == reference.texts
    assert [greedy for _, greedy in ours.choices] == [greedy for _, greedy in reference.choices]
    assert [value for value, _ in ours.choices] == pytest.approx(
        [value for value, _ in reference.choices], abs=LOGLIKELIHOOD_TOLERANCE
    )
    assert ours.perplexities == pytest.approx(reference.perplexities, abs=LOGLIKELIHOOD_TOLERANCE)
