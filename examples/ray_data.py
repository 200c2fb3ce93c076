"""Complete a file of prompts on the machines of a Ray cluster, with one engine per actor.

    python ray_data.py [INPUT.jsonl [OUTPUT_DIRECTORY]]

It runs on the cluster at RAY_ADDRESS, or on a local Ray if the variable is not set. A line of the
input holds `prompt`; its other fields are copied to the output.
"""

import os
import sys
from typing import Any

try:
    import ray
except ImportError as error:
    sys.exit(f"ray_data.py needs Ray: pip install 'ray[data]' ({error})")

from shmllm import LLM, EngineDeadError, SamplingParams

ENGINES = 1  # in the whole cluster; a machine holds as many as its cores allow
CORES_PER_ENGINE = 1
ROWS_PER_BATCH = 64


class Completer:
    """Runs an engine on the rows that Ray sends. Ray makes an actor from this class."""

    def __init__(self, max_tokens: int = 16) -> None:
        self.llm = LLM(num_threads=CORES_PER_ENGINE, kv_cache_memory_bytes=2**27)
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        try:
            outputs = self.llm.generate(list(batch["prompt"]), self.params, use_tqdm=False)
        except EngineDeadError as error:
            # An exception would end the whole run. When an actor exits, Ray starts a new one,
            # which computes the unfinished rows again.
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
