"""Short runs of TRL's trainers on a model that the tests make: what is trained, and on what.

Owns the model, its tokenizer, prompts and reward. The model is random and in float32, every
byte is a token, and the reward is the share of lower-case letters, which is soon learnt.
TRL is imported when a run begins: modules that import this one are collected without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
)

MAX_TOKENS = 16
NUM_STEPS = 20
LEARNING_RATE = 1e-2
WEIGHT_SCALE = 4.0
"""Random weights as they come give nearly the same probability to every token."""

DIFFERENCE = "sampling/sampling_logp_difference/max"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ["one", "two", "three", "four", "five", "six"]
PLAIN = [f"{word} is" for word in WORDS]
CHATS = [[{"role": "user", "content": f"say {word}"}] for word in WORDS]


def make_policy(directory: Path) -> None:
    """A random Qwen3 of 120 thousand parameters, and a tokenizer without merges."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(WEIGHT_SCALE)
    model.save_pretrained(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a token that ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    made: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        chat_template=CHAT_TEMPLATE,
    )
    return made


def low_rank_adapter() -> Any:
    """peft's LoRA on every matrix, which TRL merges into the weights that it sends."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def share_of_letters(text: str) -> float:
    return sum("a" <= character <= "z" for character in text) / MAX_TOKENS


@dataclass
class Run:
    """What a run showed.

    Attributes:
        log: TRL's own, an entry for each training step.
        texts: of all completions that were rewarded, in order.
        llm: the engine's front end, until the run ends.
    """

    log: list[dict[str, float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    llm: Any = None

    def has_learnt(self, by: float) -> bool:
        """Whether the mean reward of the last quarter of the steps exceeds the first's."""
        quarter = len(self.log) // 4
        first, last = (
            sum(part) / quarter for part in (self.rewards[:quarter], self.rewards[-quarter:])
        )
        return last > first + by

    @property
    def rewards(self) -> list[float]:
        return [entry["reward"] for entry in self.log]

    @property
    def differences(self) -> list[float]:
        """The largest difference of log-probabilities in each step, as TRL measures it."""
        return [entry[DIFFERENCE] for entry in self.log]

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        """A reward function for TRL, of plain completions and of messages."""
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        self.texts += texts
        return [share_of_letters(text) for text in texts]


@contextmanager
def trainer(
    directory: Path, prompts: list[Any] = PLAIN, kind: str = "GRPO", **options: Any
) -> Iterator[tuple[Any, Run]]:
    """A trainer of TRL's; its engine, if it has one, ends with the block.

    Args:
        directory: of the model.
        prompts: each is repeated; texts or conversations.
        kind: "GRPO" or "RLOO".
        options: of the trainer (`callbacks`, `peft_config`, `rollout_func`, ...), and any
            others of its configuration.
    """
    import trl
    from datasets import Dataset

    run = Run()
    for_trainer = ("callbacks", "eval_dataset", "peft_config", "rollout_func")
    given = {name: options.pop(name) for name in for_trainer if name in options}
    made = getattr(trl, f"{kind}Trainer")(
        model=Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
        reward_funcs=run.reward,
        args=getattr(trl, f"{kind}Config")(**(defaults(directory) | options)),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts * 8]),
        **given,
    )
    made.remove_callback(PrinterCallback)
    run.llm = made.vllm_generation.llm if made.use_vllm else None
    try:
        yield made, run
    finally:
        if run.llm is not None:
            run.llm.close()


def defaults(directory: Path) -> dict[str, Any]:
    """Options of each run, unless it says otherwise."""
    return {
        "output_dir": str(directory / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
    }


def train(directory: Path, begin: Callable[[Any, Run], None] | None = None, **options: Any) -> Run:
    """Train to the end. `begin` is called with the trainer and the run before the first step."""
    with trainer(directory, **options) as (made, run):
        if begin is not None:
            begin(made, run)
        made.train()
        run.log = [entry for entry in made.state.log_history if "reward" in entry]
    return run


@contextmanager
def environment_kept() -> Iterator[None]:
    """TRL sets variables for torch.distributed, and compute threads are set for the run."""
    variables, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(variables)
