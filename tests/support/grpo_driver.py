"""A program that trains, as one of several that torchrun starts: each has an engine of its own.

    torchrun --nproc-per-node 2 grpo_driver.py POLICY NUM_STEPS

Writes what its run showed into POLICY/RANK.json, and leaves its engine to the end of the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from support.grpo_runs import trainer

from shmllm.compat import trl


def main(directory: Path, num_steps: int) -> None:
    torch.set_num_threads(1)
    trl.install()
    with trainer(directory, max_steps=num_steps, per_device_train_batch_size=8) as (made, run):
        made.train()
        run.log = [entry for entry in made.state.log_history if "reward" in entry]
        result = {"texts": run.texts, "differences": run.differences, "engine": run.llm.engine_pid}
        (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        os._exit(0)  # neither `close` nor finalizers


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
