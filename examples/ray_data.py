"""Complete a file of prompts on a Ray cluster, each row exactly once, with one engine per actor.

    python ray_data.py [INPUT.jsonl [DIRECTORY]]

It runs on the cluster at RAY_ADDRESS, or on a local Ray if the variable is not set. A line of the
input holds `id`, which no other line has, `prompt` and perhaps `seed`; fields are copied. If the
run ends early, whatever the reason, the same command computes what is missing.
DIRECTORY, which all machines share, then has each id once in completions.jsonl.
"""

import glob
import hashlib
import json
import os
import sys
from typing import Any

try:
    import ray
    from ray.data.checkpoint import CheckpointConfig
except ImportError as error:
    sys.exit(f"ray_data.py needs Ray: pip install 'ray[data]>=2.60,<2.64' ({error})")

from shmllm import LLM, EngineDeadError, SamplingParams

ENGINES = 1  # in the whole cluster; a machine holds as many as its cores allow
CORES_PER_ENGINE = 1
ROWS_PER_BATCH = 64
MAX_RETRIES = 3  # of a batch whose engine or actor dies; then the run ends


def seed_of(row_id: object, own: int | None = None) -> int:
    """A row that is computed again gets the same text, whichever engine computes it."""
    digest = hashlib.blake2b(str(row_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 if own is None else own


class Completer:
    """Runs an engine on the rows that Ray sends. Ray makes an actor from this class."""

    def __init__(self, max_tokens: int = 16, **options: Any) -> None:
        defaults = {"num_threads": CORES_PER_ENGINE, "kv_cache_memory_bytes": 2**27}
        self.llm = LLM(**defaults | options)
        self.defaults = {"temperature": 0.8, "max_tokens": max_tokens}

    def params(self, batch: dict[str, Any]) -> list[SamplingParams]:
        seeds = batch.get("seed", [seed_of(row_id) for row_id in batch["id"]])
        return [SamplingParams(seed=int(seed), **self.defaults) for seed in seeds]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        try:
            outputs = self.llm.generate(list(batch["prompt"]), self.params(batch), use_tqdm=False)
        except EngineDeadError as error:
            # After an exception Ray asks the same actor, whose engine is dead, again, or ends the
            # run. When an actor exits, Ray starts a new one, which computes the rows again.
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        batch["text"] = [output.outputs[0].text for output in outputs]
        batch["num_tokens"] = [len(output.outputs[0].token_ids) for output in outputs]
        return batch


def join(parts: str, target: str) -> int:
    """Writes each id once: a task that Ray believes dead may have written its rows, too."""
    seen = set()
    with open(f"{target}.new", "w") as out:
        for path in sorted(glob.glob(parts)):
            with open(path) as lines:
                for line in lines:
                    row_id = json.loads(line)["id"]
                    if row_id not in seen:
                        out.write(line)
                    seen.add(row_id)
    os.replace(f"{target}.new", target)
    return len(seen)


def main() -> None:
    if "RAY_ADDRESS" not in os.environ:
        # Actors keep their CPUs. Without two more, the tasks that read and write wait for ever.
        ray.init(num_cpus=ENGINES * CORES_PER_ENGINE + 2)
    directory = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else "completions")
    parts, target = f"{directory}/parts", f"{directory}/completions.jsonl"
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id",
        checkpoint_path=f"{directory}/checkpoint",
        delete_checkpoint_on_success=False,  # or the same command would compute all rows again
    )
    if len(sys.argv) > 1:
        rows = ray.data.read_json(sys.argv[1])  # lines=True makes blocks that no checkpoint takes
    else:
        rows = ray.data.range(200).map(lambda row: row | {"prompt": f"def f{row['id']}("})
    # In a batch a missing seed would turn the others into floats.
    rows = rows.map(lambda row: row | {"seed": seed_of(row["id"], row.get("seed"))})
    rows.repartition(target_num_rows_per_block=ROWS_PER_BATCH).map_batches(
        Completer,
        batch_size=ROWS_PER_BATCH,
        compute=ray.data.ActorPoolStrategy(size=ENGINES),
        num_cpus=CORES_PER_ENGINE,
        max_task_retries=MAX_RETRIES,
    ).write_json(parts)
    print(f"{join(f'{parts}/*.json', target)} completions are in {target}")


if __name__ == "__main__":
    main()
