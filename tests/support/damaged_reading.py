"""Reads damaged checkpoint files, one after the other: a program that a test starts and watches.

    python damaged_reading.py FOLDER SEED FIRST COUNT

FOLDER has a model directory for each base (`damaged_bases`). Number N of SEED is always the same
file. The program prints a line of JSON for each file that was not read as it should be, and at the
end how many ended how. It ends at once with a traceback if one file takes too long. FOLDER/number
has the number of the last file. Address space is limited, so that memory for a damaged size cannot
be had.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import damaged_gguf, damaged_safetensors

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import LINK
from shmllm.frontend.gguf import directory as gguf_directory
from shmllm.frontend.model_catalog import contents_of, record_of_model
from shmllm.frontend.model_files import generation_defaults, resolve_model
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights

SLOWEST_S = 5.0
MEMORY_BYTES = 64 * 2**20
STEM = "damaged-file"
SHARDED = "sharded"
LONGEST_ERROR = 1500


class Base:
    """A model, and the content of the file of it that is damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = ModelConfig.from_directory(directory)
        self.model: DecoderModel = create_model(
            config, torch.float32, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
        )
        if directory.name.startswith("gguf"):
            self.name, self.damages = "m.gguf", damaged_gguf.DAMAGES
        elif directory.name.startswith(SHARDED):
            self.name = "model.safetensors.index.json"
            self.damages = damaged_safetensors.INDEX_DAMAGES
        else:
            self.name, self.damages = "model.safetensors", damaged_safetensors.DAMAGES
        self.content = (directory / self.name).read_bytes()


def stages_of_gguf(base: Base, content: bytes, place: Path) -> list[Callable[[], object]]:
    """What a start with `-m FILE.gguf` does, and what it does again if weights are reloaded."""
    path = place / f"{STEM}.gguf"
    path.write_bytes(content)
    directory = place / f"{STEM}-directory"
    directory.mkdir()
    (directory / LINK).symlink_to(path)

    def start() -> None:
        made = resolve_model(str(path))
        ModelConfig.from_directory(made)
        generation_defaults(made)
        Tokenizer.from_directory(made).encode("a text")

    return [
        lambda: record_of_model("m", "local", path),
        lambda: contents_of(path),
        start,
        lambda: load_weights(base.model, directory),
    ]


def stages_of_safetensors(base: Base, content: bytes, place: Path) -> list[Callable[[], object]]:
    directory = place / f"{STEM}-directory"
    shutil.copytree(base.directory, directory)
    (directory / base.name).write_bytes(content)
    return [
        lambda: record_of_model("m", "local", directory),
        lambda: load_weights(base.model, directory),
    ]


def fault(stage: Callable[[], object], outcomes: Counter[str]) -> str | None:
    """What is wrong with how a stage ended; None if nothing is."""
    try:
        stage()
    except EngineStartError as error:
        outcomes["refused"] += 1
        text = str(error)
        if not text.isprintable():
            return f"not one printable line: {text!r}"
        if len(text) > LONGEST_ERROR:
            return f"an error of {len(text)} characters: {text}"
        return None if STEM in text else f"does not name the file: {text}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"
    outcomes["read"] += 1
    return None


def limit_memory(extra: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, hard))


def examine(base: Base, content: bytes, work: Path, outcomes: Counter[str]) -> list[str]:
    """The faults of one file."""
    place = work / "file"
    place.mkdir()
    is_gguf = base.name.endswith(".gguf")
    stages = (stages_of_gguf if is_gguf else stages_of_safetensors)(base, content, place)
    found = []
    for number, stage in enumerate(stages):
        faulthandler.dump_traceback_later(SLOWEST_S, exit=True)
        limit_memory(MEMORY_BYTES + len(content))
        problem = fault(stage, outcomes)
        faulthandler.cancel_dump_traceback_later()
        if problem is not None:
            found.append(f"stage {number}: {problem}")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    shutil.rmtree(place)
    shutil.rmtree(work / "made", ignore_errors=True)
    return found


def main() -> None:
    folder, seed, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    patched: Any = gguf_directory
    patched._places = lambda: [work / "made"]
    bases = [Base(directory) for directory in sorted(folder.glob("*-base"))]
    outcomes: Counter[str] = Counter()
    for base in bases:  # what is imported and allocated once does not count below
        problems = examine(base, base.content, work, outcomes)
        assert not problems, (base.directory, problems)
    assert outcomes.pop("refused", 0) == 0
    outcomes.clear()
    last = os.open(folder / "number", os.O_WRONLY | os.O_CREAT)
    for number in range(first, first + count):
        os.pwrite(last, b"%12d" % number, 0)
        rng = random.Random(f"{seed}/{number}")
        base = rng.choice(bases)
        damage = rng.choice(base.damages)
        for problem in examine(base, damage(rng, base.content), work, outcomes):
            record = {"number": number, "base": base.directory.name, "damage": damage.__name__}
            print(json.dumps(record | {"problem": problem[:600]}), flush=True)
    print(json.dumps({"files": count, **outcomes}))


if __name__ == "__main__":
    main()
