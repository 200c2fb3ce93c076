"""A program that uses Ray Data as its users do, and writes down what came of each scenario.

    python ray_driver.py DIRECTORY

Reads job.json and writes results.json there. Each batch that an actor begins leaves a mark
in a file named like the scenario, so that whoever started the driver can kill an engine then.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_data.py"

PROCESSOR_MARKS = "PROCESSOR_MARKS"

Rows = list[dict[str, Any]]


def mark(file: str) -> None:
    with open(file, "a") as marks:
        marks.write("begun\n")


class Completer(runpy.run_path(str(EXAMPLE))["Completer"]):  # type: ignore[misc]
    """The example's actor, and a mark for each batch."""

    def __init__(self, marks: str, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.marks = marks

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        mark(self.marks)
        return self.complete(batch)

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().__call__(batch)  # type: ignore[no-any-return]


class Raising(Completer):
    """One that does nothing about an engine's death."""

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["prompt"]), self.params(batch), use_tqdm=False)
        return batch | {"text": [output.outputs[0].text for output in outputs]}


def completed(actor: type, marks: Path, job: dict[str, Any]) -> Rows | str:
    """All rows, completed by an actor; or how that failed."""
    rows = ray.data.from_items(job["rows"]).map_batches(
        actor,
        fn_constructor_args=[str(marks), job["max_tokens"]],
        batch_size=job["batch_size"],
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    try:
        return list(rows.take_all())
    except Exception as error:
        return str(error)


def set_up_worker() -> None:
    """The shim, and a mark for each request of the processor's engine."""
    import_module("shmllm.compat.vllm").install()
    engine = import_module("shmllm.compat.vllm_async").AsyncLLM
    generate = engine.generate

    def marking(self: Any, *arguments: Any, **options: Any) -> Any:
        mark(os.environ[PROCESSOR_MARKS])
        return generate(self, *arguments, **options)

    engine.generate = marking


def processed(job: dict[str, Any], preprocess: Any, postprocess: Any, **options: Any) -> Rows | str:
    """All rows through Ray's processor for vLLM; or how that failed."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    config = vLLMEngineProcessorConfig(
        model_source=job["model"],
        engine_kwargs={"num_threads": 1, "kv_cache_memory_bytes": 2**27},
        placement_group_config={"bundles": [{"CPU": 1}]},
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        concurrency=1,
        batch_size=job["batch_size"],
        **options,
    )
    processor = build_processor(config, preprocess=preprocess, postprocess=postprocess)
    try:
        return list(processor(ray.data.from_items(job["rows"])).take_all())
    except Exception as error:
        return str(error)


def generated(job: dict[str, Any]) -> Rows | str:
    """All rows with their completions."""
    params = {"temperature": 0, "max_tokens": job["max_tokens"], "logprobs": 1}
    return processed(
        job,
        lambda row: row | {"sampling_params": params},
        lambda row: {
            "id": row["id"],
            "text": row["generated_text"],
            "num_logprobs": len(row["logprobs"]),
        },
    )


def embedded(job: dict[str, Any]) -> Rows | str:
    """All rows with their embeddings."""
    return processed(
        job,
        lambda row: row,
        lambda row: {"id": row["id"], "vector": list(row["embeddings"])},
        task_type="embed",
    )


def main() -> None:
    directory = Path(sys.argv[1])
    job = json.loads((directory / "job.json").read_text())
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _temp_dir=job["temporary"],
        runtime_env={
            "worker_process_setup_hook": set_up_worker,
            "env_vars": {PROCESSOR_MARKS: str(directory / "processor")},
        },
    )
    scenarios = {"undisturbed": Completer, "raising": Raising, "restarted": Completer}
    results = {name: completed(actor, directory / name, job) for name, actor in scenarios.items()}
    results["processor"] = generated(job)
    results["embedded"] = embedded(job)
    ray.shutdown()
    (directory / "results.json").write_text(json.dumps(results, default=list))


if __name__ == "__main__":
    main()
