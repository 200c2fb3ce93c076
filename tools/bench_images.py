#!/usr/bin/env python3
"""Measures what images cost, with random weights in the sizes of SmolVLM-256M.

    python tools/bench_images.py --json FILE

    prepare   ms to prepare one image beside transformers' Pil classes, for each image processor,
              with and without the identity that finds an image again
    seen      seconds to the first token of a prompt with an image that is new, with one that was
              sent before, and of a text of as many tokens
    text      texts/s of an engine that takes images beside one with language_model_only

Each ratio is of pairs that are measured in turns in one run. Prefix caching is off, so that a known
image saves its pixels and its tower, and nothing else.
"""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench_engine import cpu_s
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shmllm import LLM, SamplingParams
from shmllm.cli.bench_output import describe_machine
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.images.rules.registry import rules_of_model

TEXT = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "head_dim": 64,
}
VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
MARKS = ["<|im_end|>", "<fake_token_around_image>", "<image>", "<global-img>", *ROWS]
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "siglip": {"size": {"height": 384, "width": 384}},
    "idefics3": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    "smolvlm": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    "qwen2_vl": {"patch_size": 14},
    "gemma3": {"size": {"height": 896, "width": 896}},
}
CLASSES = {
    "clip": "CLIP",
    "siglip": "Siglip",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
    "qwen2_vl": "Qwen2VL",
    "gemma3": "Gemma3",
}
SIZES = ((640, 480), (1920, 1080))


def make_model(directory: Path) -> None:
    """Writes the files of a model without weights."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(m, normalized=False, special=True) for m in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "scale_factor": 4,
        "image_token_id": tokenizer.token_to_id("<image>"),
        "text_config": TEXT | {"eos_token_id": tokenizer.token_to_id("<|im_end|>")},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    }
    kind = {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True}
    sizes = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}
    for name, values in (
        ("config.json", config),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>", "image_token": "<image>"}),
        ("preprocessor_config.json", kind | sizes),
    ):
        (directory / name).write_text(json.dumps(values), encoding="utf-8")


def least_ms(call: Callable[[], object], rounds: int) -> float:
    """The least time of a call in CPU ms of this thread."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return 1000 * min(times)


def picture(width: int, height: int, seed: int) -> Any:
    """A photograph-like picture: smooth areas with some noise."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = draw.integers(-8, 9, smooth.shape, dtype=np.int16)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))


def identify(image: Any) -> bytes:
    """What finds an image again costs as much."""
    return sha256(image.tobytes()).digest()


def measure_preparing(rounds: int) -> list[dict[str, Any]]:
    """Our preparation beside transformers', in turns of processors."""
    found = []
    for name, settings in SETTINGS.items():
        kind = CLASSES[name]
        module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        theirs = getattr(module, f"{kind}ImageProcessorPil")(**settings)
        values = json.loads(json.dumps(theirs.to_dict(), default=str))
        values["image_processor_type"] = f"{kind}ImageProcessor"
        rules = rules_of_model(settings_of(values, name))
        for width, height in SIZES:
            image = picture(width, height, 3)
            ours = least_ms(partial(rules.tiles, image), rounds)
            other = least_ms(partial(theirs, [image], return_tensors="np"), rounds)
            identity = least_ms(partial(identify, image), rounds)
            found.append(
                {
                    "processor": name,
                    "size": f"{width}x{height}",
                    "ours_ms": ours,
                    "identity_ms": identity,
                    "transformers_ms": other,
                    "ratio": other / ours,
                    "ratio_with_identity": other / (ours + identity),
                }
            )
    return found


def measure_seen(llm: LLM, rounds: int) -> dict[str, float]:
    """Seconds to the first token of a new image, of one that was sent, and of a text."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times: dict[str, list[float]] = {"new": [], "seen": [], "text": []}
    llm.generate(["warm up"], params, use_tqdm=False)
    for number in range(rounds + 1):
        prompt: Any = {
            "prompt": "<image>",
            "multi_modal_data": {"image": picture(640, 480, number)},
        }
        for name in ("new", "seen"):
            began = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            times[name].append(time.perf_counter() - began)
        ids = [7 + number % 90] * len(output.prompt_token_ids)
        began = time.perf_counter()
        llm.generate([ids], params, use_tqdm=False)
        times["text"].append(time.perf_counter() - began)
    medians = {f"{name}_s": statistics.median(each[1:]) for name, each in times.items()}
    extra = (a - b for a, b in zip(times["seen"][1:], times["text"][1:], strict=True))
    metrics = llm.get_metrics()
    return medians | {
        "seen_minus_text_s": statistics.median(extra),
        "tower_runs": metrics["item_queries"] - metrics["item_hits"],
    }


def measure_text(directory: Path, options: dict[str, Any], rounds: int) -> dict[str, float]:
    """The time of an engine that takes images over that of one which does not, for texts: CPU time
    of the engines' processes, which other programs disturb less, and wall time."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5 + i, *range(7, 71)] for i in range(8)]
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    with (
        LLM(str(directory), **options) as both,
        LLM(str(directory), **options, language_model_only=True) as only,
    ):
        for number in range(rounds + 1):
            took = {}
            for llm in (both, only) if number % 2 else (only, both):
                began, cpu_began = time.perf_counter(), cpu_s(llm.engine_pid)
                llm.generate(prompts, params, use_tqdm=False)
                took[llm is both] = cpu_s(llm.engine_pid) - cpu_began, time.perf_counter() - began
            for index, each in enumerate(ratios.values() if number else ()):
                each.append(took[True][index] / took[False][index])
    return {f"{name}_ratio": statistics.median(each) for name, each in ratios.items()}


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Rounds of each measurement.")
@click.option("--threads", default=1, show_default=True, help="Threads of each engine.")
@click.option("--dtype", default="float32", show_default=True, help="Dtype of the weights.")
@click.option("--json", "target", type=click.Path(), help="Write the record there.")
def main(rounds: int, threads: int, dtype: str, target: str | None) -> None:
    """Measure what images cost."""
    options = {
        "load_format": "dummy",
        "dtype": dtype,
        "num_threads": threads,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    record: dict[str, Any] = {"machine": describe_machine(), "dtype": dtype, "threads": threads}
    record["prepare"] = measure_preparing(rounds)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory)
        with LLM(str(directory), **options) as llm:
            record["seen"] = measure_seen(llm, rounds)
        record["text"] = measure_text(directory, options, rounds)
    text = json.dumps(record, indent=2)
    click.echo(text)
    if target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
