#!/usr/bin/env python3
"""Compares tokens/s of an encoder-decoder of texts in shmllm and in transformers, in turns.

    python tools/bench_encoder_texts.py --json FILE

The models have the sizes of T5 1.1 base and BART base, and random weights. Both peers run the same
random prompts, greedy, without early stop; every prompt is different. transformers gets all prompts
of a load as one batch. A round runs each load on both in turn: compare the ratios. `encoded` is the
part of shmllm's time that its encoder takes.

`--cpu` counts the CPU time of the process instead of wall time, which other programs disturb less.
Use it with `--threads 1`, because several threads wait by spinning.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from tokenizers import Tokenizer, models

from shmllm import LLM, SamplingParams
from shmllm.cli.bench_output import describe_machine
from shmllm.worker.items import ItemEmbeds

LOADS = ((1, 32, 32), (16, 64, 32), (64, 20, 20))
"""Requests, tokens for the encoder, and generated ones."""
NUM_TOKENS = 32_128
Prompts = list[list[int]]


def make_models() -> dict[str, Any]:
    """Random models of transformers."""
    t5 = transformers.T5Config(
        vocab_size=NUM_TOKENS,
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    bart = transformers.BartConfig(
        vocab_size=NUM_TOKENS,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        forced_eos_token_id=None,
    )
    make = transformers.AutoModelForSeq2SeqLM.from_config
    return {name: make(config).eval() for name, config in (("t5", t5), ("bart", bart))}


class Encoding:
    """Adds up the time of encoders.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        update = ItemEmbeds.update

        def timed(embeds: ItemEmbeds, plan: Any) -> None:
            began = clock()
            update(embeds, plan)
            self.seconds += clock() - began

        ItemEmbeds.update = timed  # type: ignore[assignment,method-assign]


def measure(
    directory: Path, model: Any, options: dict[str, Any], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """The medians of each load.

    Args:
        directory: the model's.
        model: the same in transformers.
        options: of the engine.
        rounds: how often each load runs, behind a round of warm-up.
        clock: returns seconds.
    """
    encoding, draw = Encoding(clock), random.Random(0)
    taken: dict[tuple[Any, str], list[float]] = {}
    with LLM(str(directory), multiprocess=False, **options) as llm:

        def ours(prompts: Prompts, count: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            given: list[Any] = [{"prompt_token_ids": each} for each in prompts]
            llm.generate(given, params, use_tqdm=False)

        @torch.inference_mode()
        def theirs(prompts: Prompts, count: int) -> None:
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            model.generate(torch.tensor(prompts), do_sample=False, **lengths)

        for number in range(rounds + 1):
            for load in LOADS:
                count, length, new = load
                for name, run in (("shmllm", ours), ("transformers", theirs)):
                    prompts = [
                        [draw.randrange(9, NUM_TOKENS) for _ in range(length)] for _ in range(count)
                    ]
                    encoding.seconds, began = 0.0, clock()
                    run(prompts, new)
                    seconds = clock() - began
                    if number:
                        taken.setdefault((load, name), []).append(seconds)
                    if number and name == "shmllm":
                        taken.setdefault((load, "encoded"), []).append(encoding.seconds / seconds)
    found = []
    for load in LOADS:
        both = {name: taken[load, name] for name in ("shmllm", "transformers")}
        row: dict[str, Any] = dict(zip(("requests", "encoder", "new"), load, strict=True))
        for name, each in both.items():
            row[name] = load[0] * load[2] / statistics.median(each)
        ratios = (theirs / ours for ours, theirs in zip(*both.values(), strict=True))
        row["ratio"] = statistics.median(ratios)
        found.append(row | {"encoded": statistics.median(taken[load, "encoded"])})
    return found


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds of each load.")
@click.option("--threads", default=2, show_default=True, help="Threads of both.")
@click.option("--dtype", default="float32", show_default=True, help="Dtype of the weights.")
@click.option("--cpu", is_flag=True, help="Count CPU time.")
@click.option("--json", "target", type=click.Path(), help="Write the record there.")
def main(rounds: int, threads: int, dtype: str, cpu: bool, target: str | None) -> None:
    """Compare encoder-decoders with transformers."""
    torch.set_num_threads(threads)
    clock = time.process_time if cpu else time.perf_counter
    record: dict[str, Any] = {"machine": describe_machine(), "dtype": dtype, "threads": threads}
    record["time"] = "CPU" if cpu else "wall"
    for name, model in make_models().items():
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            model.to(getattr(torch, dtype)).save_pretrained(directory)
            words = {f"t{number}": number for number in range(NUM_TOKENS)}
            tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
            tokenizer.save(str(directory / "tokenizer.json"))
            options = {"dtype": dtype, "num_threads": threads, "max_num_seqs": 64}
            record[name] = measure(directory, model, options, rounds, clock)
    text = json.dumps(record, indent=2)
    click.echo(text)
    if target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
