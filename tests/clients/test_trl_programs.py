"""Programs that train with TRL: the example, and several processes under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.client_helpers import needs
from support.programs import ROOT, is_running, python, result_of, run_source
from support.waiting import wait_until

pytestmark = [
    pytest.mark.clients,
    pytest.mark.usefixtures("no_leaks"),
    needs("trl", "datasets"),
]

SAME = 1e-3
NUM_STEPS = 3
TESTS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"}
TIMEOUT_S = 300

ONLINE_DPO = """
    import json, sys, warnings
    from pathlib import Path

    warnings.simplefilter("ignore")
    from shmllm.compat import vllm

    vllm.install()  # before trl is imported
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3ForCausalLM
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    from support.grpo_runs import PLAIN, defaults, share_of_letters

    rewards = []

    def reward(prompts, completions, completion_ids, **_):
        rewards.append([share_of_letters(text) for text in completions])
        return rewards[-1]

    directory = Path(sys.argv[1])
    options = defaults(directory) | {"max_new_tokens": 16, "max_length": 64, "max_steps": 12}
    del options["num_generations"], options["max_completion_length"]
    trainer = OnlineDPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(directory),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
        reward_funcs=reward,
        args=OnlineDPOConfig(**options | {"learning_rate": 3e-3}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PLAIN * 32]),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print(json.dumps([sum(each) / len(each) for each in rewards]))
"""


def run_example(name: str, directory: Path) -> str:
    """Run an example; return what it writes to stdout."""
    done = python(str(ROOT / "examples" / name), cwd=directory, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()[-8000:]
    return done.stdout.decode()


def test_the_example_learns_and_draws_its_reward(tmp_path: Path) -> None:
    out = run_example("grpo_colocate.py", tmp_path)
    (first, last) = map(float, re.findall(r"^reward ([\d.]+) -> ([\d.]+)", out, re.MULTILINE)[0])
    assert last > first + 0.3
    page = (tmp_path / "grpo.html").read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>")
    root = ElementTree.fromstring(page)
    assert len([part for part in root.iter() if part.tag.endswith("polyline")]) == 2
    shades = [part for part in root.iter() if "fill-opacity" in part.attrib]
    assert len(shades) > 2 * 12  # it slept in each step, and both panels show it


def train_under_torchrun(
    directory: Path,
    *further: str,
    num_processes: int = 2,
    tensor_parallel_size: int = 2,
    num_steps: int = NUM_STEPS,
) -> list[dict[str, Any]]:
    """Train in several processes; return what each one's run showed, by rank."""
    driver = Path(__file__).parents[1] / "support" / "grpo_driver.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone")
    arguments = (str(directory), str(num_steps), str(tensor_parallel_size), *further)
    processes = ("--nproc-per-node", str(num_processes))
    done = python(*torchrun, *processes, str(driver), *arguments, timeout=TIMEOUT_S, env=TESTS)
    assert done.returncode == 0, done.stderr.decode()[-8000:]
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_processes)]
    for rank in ranks:
        assert len(rank["differences"]) == num_steps
        assert max(rank["differences"]) < SAME
        wait_until(lambda pid=rank["engine"]: not is_running(pid), "the engine ends")
    return ranks


def test_each_process_of_torchrun_has_an_engine_of_its_own(policy: Path) -> None:
    ranks = train_under_torchrun(policy, tensor_parallel_size=1)
    assert ranks[0]["engine"] != ranks[1]["engine"]
    assert not set(ranks[0]["texts"]) & set(ranks[1]["texts"])


def test_processes_of_a_tensor_parallel_group_share_an_engine(policy: Path) -> None:
    ranks = train_under_torchrun(policy, num_steps=20)
    assert ranks[0]["engine"] == ranks[1]["engine"]
    first, second = ({text for text in rank["texts"][:24] if len(text) > 4} for rank in ranks)
    assert first
    assert not first & second  # each has its share
    rewards = ranks[0]["rewards"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_processes_that_share_an_engine_send_it_an_adapter(policy: Path) -> None:
    ranks = train_under_torchrun(policy, "adapter")
    assert ranks[0]["engine"] == ranks[1]["engine"]


def test_each_of_two_groups_has_an_engine(policy: Path) -> None:
    ranks = train_under_torchrun(policy, num_processes=4, num_steps=2)
    engines = [rank["engine"] for rank in ranks]
    assert engines[0] == engines[1] != engines[2] == engines[3]


def test_a_trainer_that_looks_for_vllm_itself(policy: Path) -> None:
    rewards = result_of(run_source(ONLINE_DPO, str(policy), timeout=TIMEOUT_S, env=TESTS))
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3])
