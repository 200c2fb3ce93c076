"""Train with reinforcement learning and TRL: the model learns to begin functions with a docstring.

Trainer and engine share the machine: while one works, the other sleeps. Each step generates with
the trainer's current weights. The program writes grpo.html with the reward and the engine's memory.
"""

import sys

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"grpo_colocate.py needs the extra 'rl': pip install trl peft ({error})")
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from shmllm.bench.engine_watch import EngineWatch
from shmllm.bench.timeline import Panel, write_timeline
from shmllm.compat import trl
from shmllm.frontend.model_files import resolve_model

NUM_STEPS = 12
NAMES = ["add", "average", "clamp", "count", "first", "largest", "reverse", "smallest"]

directory = resolve_model("tiny")
rewards = []


def begins_with_docstring(completions, **_):
    each = [float('"""' in text[:12]) for text in completions]
    rewards.append((watch.now, sum(each) / len(each)))
    progress.update(task, advance=1, description=f"reward {rewards[-1][1]:.2f}")
    return each


trl.install()  # from here on TRL's colocate mode uses shmllm
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
    processing_class=AutoTokenizer.from_pretrained(directory),
    reward_funcs=begins_with_docstring,
    train_dataset=Dataset.from_list([{"prompt": f"def {n}(values):\n"} for n in NAMES * 4]),
    args=GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=16,
        max_completion_length=24,
        learning_rate=1e-4,
        **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"},
        disable_tqdm=True,
    ),
)
trainer.remove_callback(PrinterCallback)
llm = trainer.vllm_generation.llm
with Progress() as progress, EngineWatch(llm) as watch:
    task = progress.add_task("", total=NUM_STEPS)
    trainer.train()
memory = Panel("engine's memory, MiB", [(at, size / 2**20) for at, size in watch.memory])
write_timeline("grpo.html", "GRPO", [Panel("reward", rewards), memory], watch.asleep, "asleep")
print(f"reward {rewards[0][1]:.2f} -> {rewards[-1][1]:.2f}, picture in grpo.html")
