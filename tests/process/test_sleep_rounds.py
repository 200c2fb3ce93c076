"""A trainer's day: hundreds of rounds of sleep, update and generation, with flat memory.

pytest -n 0 -s -m slow tests/process/test_sleep_rounds.py prints a table and takes minutes.
SHMLLM_ROUNDS sets the number of rounds. The trainer is a process of its own, which has the weights
and does nothing else, so that memory of the tests is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import environment
from support.reference_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks"), pytest.mark.slow]

NUM_ROUNDS = int(os.environ.get("SHMLLM_ROUNDS", "200"))
WARM_ROUNDS = 10
DEADLINE_S = 3600
MIB = 2**20
SIDES = ("front_end", "engine")
GROWTH_BYTES = 8 * MIB
"""How much the resident memory of a process may grow after the first rounds: a sixth of the
weights. The libraries of torch and the allocator of C take some of it."""

TRAINER = """
import gc, json, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from shmllm import LLM, SamplingParams

def resident(pid):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(text.split("Rss:")[1].split()[0])

def shared_bytes():
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target, stat = os.readlink(link), link.stat()
        except OSError:
            continue
        if target.startswith(("/dev/shm/", "/memfd:")):
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())

def measure(llm):
    gc.collect()
    row = {"shared": shared_bytes()}
    for name, pid in (("front_end", os.getpid()), ("engine", llm.engine_pid)):
        row[name] = resident(pid)
        row[name + "_fds"] = len(os.listdir(f"/proc/{pid}/fd"))
        row[name + "_threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return row

directory, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
weights = {name: each.clone() for name, each in load_file(directory / "model.safetensors").items()}
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompts = [{"prompt_token_ids": list(range(1, length))} for length in (5, 40, 200)]
first = None
with LLM(str(directory), kv_cache_memory_bytes=2**25) as llm:
    for number in range(1, num_rounds + 1):
        llm.sleep(2)
        asleep = resident(llm.engine_pid)
        llm.wake_up(tags=["weights"])
        llm.update_weights(weights, version=number)
        assert llm.wake_up()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [each.outputs[0].token_ids for each in outputs]
        first = first or tokens
        assert tokens == first
        assert outputs[0].outputs[0].weight_versions[0].version == number
        print(json.dumps({"round": number, "asleep": asleep} | measure(llm)), flush=True)
"""


def test_rounds_of_a_trainer_leave_memory_flat(tmp_path: Path) -> None:
    make_model("llama", tmp_path, hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
    command = [sys.executable, "-c", TRAINER, str(tmp_path), str(NUM_ROUNDS)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=environment(), timeout=DEADLINE_S, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print()
    for row in rows:
        if row["round"] in (1, WARM_ROUNDS, NUM_ROUNDS // 2, NUM_ROUNDS):
            print(
                ", ".join(
                    f"{name} {value / MIB:.1f} MiB" if value > MIB else f"{name} {value}"
                    for name, value in row.items()
                )
            )
    warm, last = rows[WARM_ROUNDS - 1], rows[-1]
    assert len(rows) == NUM_ROUNDS
    for name in ("shared", *(f"{side}_{what}" for side in SIDES for what in ("fds", "threads"))):
        assert last[name] == warm[name], name
    for name in (*SIDES, "asleep"):
        assert last[name] <= warm[name] + GROWTH_BYTES, name
