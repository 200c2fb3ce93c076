"""Complete a file of prompts on every machine of a Ray cluster: an engine for each actor.

    python ray_data.py [INPUT.jsonl [OUTPUT_DIRECTORY]]

Needs `pip install 'ray[data]'`. With RAY_ADDRESS set it runs on that cluster, and otherwise
on a Ray of its own on this machine. A line of the input holds `prompt`; all else that it
holds is carried over.
"""

import os
import sys
from typing import Any

import ray

from shmllm import LLM, EngineDeadError, SamplingParams

ENGINES = 1  # in the whole cluster; a machine holds as many as its cores allow
CORES_PER_ENGINE = 1
ROWS_PER_BATCH = 64


class Completer:
    """An engine and the rows that Ray sends it. Ray makes an actor of this class."""

    def __init__(self, max_tokens: int = 16) -> None:
        self.llm = LLM(num_threads=CORES_PER_ENGINE, kv_cache_memory_bytes=2**27)
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        try:
            outputs = self.llm.generate(list(batch["prompt"]), self.params, use_tqdm=False)
        except EngineDeadError as error:
            # An exception would end the whole run. An actor that is gone is started anew,
            # and what it had not finished is computed again.
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        batch["text"] = [output.outputs[0].text for output in outputs]
        return batch


def main() -> None:
    if len(sys.argv) > 1:
        rows = ray.data.read_json(sys.argv[1], lines=True)
    else:
        rows = ray.data.from_items([{"id": n, "prompt": f"def f{n}("} for n in range(200)])
    target = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else "completions")
    rows.map_batches(
        Completer,
        batch_size=ROWS_PER_BATCH,
        compute=ray.data.ActorPoolStrategy(size=ENGINES),
        num_cpus=CORES_PER_ENGINE,
    ).write_json(target)
    print(f"the completions are in {target}")


if __name__ == "__main__":
    main()
