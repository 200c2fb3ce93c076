#!/usr/bin/env python3
"""Trains the tokenizer and the weights of the bundled model on the source of the standard library.

The tool downloads nothing. The data are the interpreter's `.py` files, including its tests. About
one file in twenty, chosen by a hash of its path, is held out for evaluation. The data of a step
depend only on (seed, step), so a resumed run uses the same batches as an uninterrupted one.

    python tools/train_tiny.py                      # about an hour on two cores
    python tools/train_tiny.py --device cuda        # minutes
    python tools/train_tiny.py --resume             # continue after an interruption
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

REPOSITORY = Path(__file__).resolve().parent.parent
EXCLUDED_PARTS = {"site-packages", "__pycache__", "lib2to3"}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT = 0
WARM_UP_STEPS = 64
# This splits text into words with their leading space, runs of spaces (Python's indentation) as a
# whole, and groups of at most three digits.
PRE_TOKENIZE = r"""\n+[ \t]*| ?[A-Za-z_]+| ?\d{1,3}| ?[^\sA-Za-z_\d]+|\s+"""

# The model is trained only on source files, so the template writes a conversation as comments.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ message.content + '\\n' }}"
    "{%- elif message.role == 'system' -%}{{ '\"\"\"' + message.content + '\"\"\"\\n\\n' }}"
    "{%- else -%}{{ '# ' + message.content | replace('\\n', '\\n# ') + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Corpus:
    """The token ids of the data.

    Attributes:
        train: token ids to train on, int32 [tokens], with END_OF_TEXT before each file.
        held_out: token ids to evaluate on, in the same form.
        num_files: number of files.
        num_bytes: total size of the files.
    """

    train: npt.NDArray[np.int32]
    held_out: npt.NDArray[np.int32]
    num_files: int
    num_bytes: int


def source_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not EXCLUDED_PARTS & set(p.relative_to(root).parts)]
    return sorted(files)


def is_held_out(name: str) -> bool:
    """Whether a file is used for evaluation instead of training."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def read_sources() -> list[tuple[str, str]]:
    """(path, text) of each source file that is UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in source_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        sources.append((path.relative_to(root).as_posix(), text))
    return sources


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def encode_corpus(tokenizer: Tokenizer, sources: list[tuple[str, str]]) -> Corpus:
    """Tokenizes the files and splits them into training and held-out data."""
    parts: dict[bool, list[int]] = {False: [], True: []}
    for name, text in sources:
        ids = parts[is_held_out(name)]
        ids.append(END_OF_TEXT)
        ids.extend(tokenizer.encode(text).ids)
    return Corpus(
        train=np.array(parts[False], dtype=np.int32),
        held_out=np.array(parts[True], dtype=np.int32),
        num_files=len(sources),
        num_bytes=sum(len(text.encode()) for _, text in sources),
    )


def model_config(vocab_size: int, max_positions: int) -> Qwen3Config:
    """The architecture of the bundled model."""
    rope: dict[str, Any] = {"rope_theta": 10_000.0}
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_positions,
        **rope,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        initializer_range=0.02,
        use_cache=False,
    )


def batch(
    ids: npt.NDArray[np.int32], step: int, seed: int, tokens: int, length: int
) -> torch.Tensor:
    """Windows of `ids` at positions that depend on (seed, step).

    Returns:
        int64 [tokens // length, length + 1].
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(ids) - length - 1, size=tokens // length)
    return torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)[None]].astype(np.int64))


def loss_of(model: Qwen3ForCausalLM, windows: torch.Tensor, bfloat16: bool) -> torch.Tensor:
    """The mean cross-entropy in nats per token, in float32.

    Args:
        model: the model.
        windows: token ids, int64 [rows, length + 1].
        bfloat16: whether to compute activations in bfloat16.
    """
    with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=bfloat16):
        logits = model(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM,
    ids: npt.NDArray[np.int32],
    length: int,
    device: str,
    max_windows: int = 64,
) -> float:
    """The float32 loss over the first disjoint windows of `length` tokens."""
    model.eval()
    num = min(max_windows, (len(ids) - 1) // length)
    losses = []
    for row in range(num):
        window = torch.from_numpy(ids[row * length : (row + 1) * length + 1].astype(np.int64))
        losses.append(loss_of(model, window[None].to(device), bfloat16=False).item())
    model.train()
    return sum(losses) / len(losses)


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_scale(step: int, steps: int) -> float:
    """The factor of the learning rate: warm-up, constant, then linear decay to 2 % in 40 %."""
    decay_from = int(steps * 0.6)
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    if step < decay_from:
        return 1.0
    return 0.02 + 0.98 * (steps - step) / (steps - decay_from)


def save_checkpoint(
    path: Path, step: int, model: Any, optimizers: list[Any], seconds: float
) -> None:
    state = {
        "step": step,
        "seconds": seconds,
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(
    model: Qwen3ForCausalLM, corpus: Corpus, work: Path, options: dict[str, Any]
) -> tuple[float, float]:
    """Trains the model; returns the mean loss of the last 50 steps and the training time in s."""
    device, steps, seed = options["device"], options["steps"], options["seed"]
    optimizers = make_optimizers(model)
    checkpoint = work / "checkpoint.pt"
    first, seconds_before = 0, 0.0
    if options["resume"] and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, seconds_before = state["step"], state["seconds"]
    peaks = [group["lr"] for o in make_optimizers(model) for group in o.param_groups]
    recent: list[float] = []
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[info]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=steps, completed=first, info="")
        for step in range(first, steps):
            length = options["context"] if step >= steps * 0.8 else options["context"] // 4
            windows = batch(corpus.train, step, seed, options["tokens_per_step"], length)
            groups = [group for o in optimizers for group in o.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * learning_rate_scale(step, steps)
            loss = loss_of(model, windows.to(device), options["bfloat16"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            recent = [*recent[-49:], loss.item()]
            mean = sum(recent) / len(recent)
            progress.update(task, advance=1, info=f"step {step + 1}/{steps} loss {mean:.3f}")
            if (step + 1) % 200 == 0:
                elapsed = seconds_before + time.monotonic() - began
                save_checkpoint(checkpoint, step + 1, model, optimizers, elapsed)
                progress.console.print(
                    f"step {step + 1} train {mean:.4f} held-out "
                    f"{evaluate(model, corpus.held_out, 256, device, 32):.4f} {elapsed:.0f} s"
                )
    return sum(recent) / len(recent), seconds_before + time.monotonic() - began


def write_card(output: Path, facts: dict[str, Any]) -> None:
    """Writes the model card, README.md."""
    bits = facts["held_out_loss"] / math.log(2) * facts["held_out_tokens"]
    trained_on = facts["steps"] * facts["tokens_per_step"]
    rows = {
        "data": (
            f"the standard library of CPython {facts['python']} as installed, including its tests: "
            f"{facts['num_files']:,} files, {facts['num_bytes'] / 1e6:.1f} MB, "
            f"{facts['train_tokens']:,} tokens to train on, {facts['held_out_tokens']:,} held "
            "out (one file in twenty, by hash of its path)"
        ),
        "training": (
            f"{facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens "
            f"({trained_on / 1e6:.1f} M tokens), windows of {facts['context'] // 4} tokens and "
            f"{facts['context']:,} in the last fifth; Muon for matrices, AdamW for embeddings and "
            "norms; "
            f"seed {facts['seed']}; {facts['seconds'] / 60:.0f} minutes on {facts['device']}"
        ),
        "final train loss": f"{facts['train_loss']:.3f} nats per token (last 50 steps)",
        "held-out loss": (
            f"{facts['held_out_loss']:.3f} nats per token, "
            f"{bits / facts['held_out_bytes']:.3f} bits per byte"
        ),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    card = f"""---
license: apache-2.0
language: [en]
library_name: shmllm
pipeline_tag: text-generation
---

# tiny

The model that is bundled with shmllm: {facts["parameters"]:,} parameters, Qwen3 architecture
(4 layers, hidden size 256, 4 query and 2 key/value heads of 64, feed-forward 768, tied
embeddings, byte-level BPE of {facts["vocab_size"]:,} entries), bfloat16, context
{facts["context"]:,} tokens. It completes Python source. It is meant for trying, testing and
measuring the engine, not for writing programs.

| | |
|---|---|
{table}

Made by `tools/train_tiny.py`. The standard library is under the Python Software
Foundation License, which allows this use; the weights are under Apache-2.0 like the rest
of the project.
"""
    (output / "README.md").write_text(card)


def write_model(output: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes weights, tokenizer and configuration in Hugging Face's form."""
    output.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.to(torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    generation = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


@click.command(context_settings={"show_default": True})
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=REPOSITORY / "shmllm/assets/tiny",
    help="Directory of the result.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("train_tiny.work"),
    help="Directory of checkpoints.",
)
@click.option("--steps", default=2000, help="Training steps.")
@click.option("--tokens-per-step", default=4096, help="Tokens in the batch of a step.")
@click.option("--vocab-size", default=4096, help="Entries of the tokenizer.")
@click.option("--context", default=1024, help="Positions; most steps train on a quarter of it.")
@click.option("--seed", default=0, help="Seed of initial weights and batches.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Device.")
@click.option("--bfloat16/--float32", default=True, help="Precision of the activations.")
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in --work.")
def main(output: Path, work: Path, vocab_size: int, **options: Any) -> None:
    """Train tokenizer and model on the source files of the interpreter's standard library."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options["seed"])
    sources = read_sources()
    tokenizer = train_tokenizer([t for n, t in sources if not is_held_out(n)], vocab_size)
    corpus = encode_corpus(tokenizer, sources)
    click.echo(f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    model = Qwen3ForCausalLM(model_config(vocab_size, options["context"])).to(options["device"])
    train_loss, seconds = train(model, corpus, work, options)
    held_out_loss = evaluate(model, corpus.held_out, 256, options["device"], max_windows=10**6)
    write_model(output, model, tokenizer)
    facts = {
        **options,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": vocab_size,
        "python": platform.python_version(),
        "num_files": corpus.num_files,
        "num_bytes": corpus.num_bytes,
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "held_out_bytes": sum(len(t.encode()) for n, t in sources if is_held_out(n)),
        "train_loss": train_loss,
        "held_out_loss": held_out_loss,
        "seconds": seconds,
    }
    write_card(output, facts)
    click.echo(f"train {train_loss:.4f}, held out {held_out_loss:.4f}; written to {output}")


if __name__ == "__main__":
    main()
