"""A program that trains, as one of several that torchrun starts.

    torchrun --nproc-per-node 2 grpo_driver.py POLICY NUM_STEPS TENSOR_PARALLEL_SIZE [adapter]

With "adapter" it trains one, which is sent by itself.

Writes what its run showed into POLICY/RANK.json, and leaves its engine to the end of the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.grpo_runs import low_rank_adapter, trainer

from shmllm.compat import trl


def main(directory: Path, num_steps: int, tensor_parallel_size: int, *adapter: str) -> None:
    torch.set_num_threads(1)
    trl.install(enable_lora=bool(adapter))
    options: dict[str, Any] = {
        "peft_config": low_rank_adapter() if adapter else None,
        "max_steps": num_steps,
        "per_device_train_batch_size": 8,
        "vllm_tensor_parallel_size": tensor_parallel_size,
    }
    with trainer(directory, **options) as (made, run):
        made.train()
        run.log = [entry for entry in made.state.log_history if "reward" in entry]
        result = {
            "texts": run.texts,
            "rewards": run.rewards,
            "differences": run.differences,
            "engine": run.llm.engine_pid,
        }
        (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        os._exit(0)  # neither `close` nor finalizers


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
