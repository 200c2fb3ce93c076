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
from support import damaged_config, damaged_gguf, damaged_safetensors

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import LINK, LINK_STEM
from shmllm.formats.gguf_pieces import piece_name
from shmllm.frontend.gguf import directory as gguf_directory
from shmllm.frontend.model_catalog import contents_of, record_of_model
from shmllm.frontend.model_files import generation_defaults, resolve_model
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights
from shmllm.worker.cpu.instructions import auto_dtype
from shmllm.worker.cpu.memory import HostMemory
from shmllm.worker.cpu.program import check_model
from shmllm.worker.loading import load_model

SLOWEST_S = 5.0
MEMORY_BYTES = 64 * 2**20
STEM = "damaged-file"
LONGEST_ERROR = 1500
TOO_LARGE = "the weights need "
"""The beginning of the error that says how much memory there is, and names no file."""


DAMAGES = {
    "*.gguf": damaged_gguf.DAMAGES,
    "*.safetensors": damaged_safetensors.DAMAGES,
    "*.index.json": damaged_safetensors.INDEX_DAMAGES,
    "config.json": damaged_config.DAMAGES,
}
"""What can be done to the files of a model, by patterns of their names."""
GGUF_LEAVES = ("config.json",)
"""A directory with GGUF files may have these, and nothing reads them."""


class Base:
    """A model directory, and what can be damaged in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_gguf = any(directory.glob("*.gguf"))
        config = ModelConfig.from_directory(directory)
        self.model: DecoderModel = create_model(
            config, torch.float32, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
        )
        patterns = [each for each in DAMAGES if not (self.is_gguf and each in GGUF_LEAVES)]
        found = ((sorted(directory.glob(each)), DAMAGES[each]) for each in patterns)
        self.files = [(paths, damages) for paths, damages in found if paths]

    def damaged(self, rng: random.Random) -> tuple[str, str, bytes]:
        """The name of one of the files, what is done to it, and its content then."""
        paths, damages = rng.choice(self.files)
        path, damage = rng.choice(paths), rng.choice(damages)
        return path.name, damage.__name__, damage(rng, path.read_bytes())


class SmallMemory(HostMemory):
    """Memory of which little is free, so that a large model is refused as it would be elsewhere."""

    def free_bytes(self) -> int:
        return MEMORY_BYTES // 4


def stages_of_gguf(base: Base, directory: Path) -> list[Callable[[], object]]:
    """What a start with `-m FILE.gguf` does, and what it does again if weights are reloaded."""
    paths = sorted(directory.glob("*.gguf"))
    path, made = paths[0], directory / "made"
    made.mkdir()
    for number, each in enumerate(paths, 1):
        link = LINK if len(paths) == 1 else piece_name(LINK_STEM, number, len(paths))
        (made / link).symlink_to(each)

    def start() -> None:
        found = resolve_model(str(path))
        ModelConfig.from_directory(found)
        generation_defaults(found)
        Tokenizer.from_directory(found).encode("a text")

    return [
        lambda: record_of_model("m", "local", path),
        lambda: contents_of(path),
        start,
        lambda: load_weights(base.model, made),
    ]


def stages_of_safetensors(base: Base, directory: Path) -> list[Callable[[], object]]:
    """What `shmllm models`, a start and a reload do."""

    def start() -> None:
        load = make_engine_config(str(directory)).load
        load_model(load, SmallMemory(), auto_dtype, check_model)

    return [
        lambda: record_of_model("m", "local", directory),
        start,
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
        is_named = STEM in text or text.startswith(TOO_LARGE)
        return None if is_named else f"does not name the file: {text}"
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


def examine(
    base: Base, work: Path, outcomes: Counter[str], name: str = "", content: bytes = b""
) -> list[str]:
    """The faults of a model with one file that has another content. Without a name all files stay,
    and memory is not limited: libraries that load at first use may crash without it."""
    directory = work / f"{STEM}-directory"
    shutil.copytree(base.directory, directory)
    if name:
        (directory / name).write_bytes(content)
    size = sum(path.stat().st_size for path in directory.iterdir())
    found = []
    stages = (stages_of_gguf if base.is_gguf else stages_of_safetensors)(base, directory)
    for number, stage in enumerate(stages):
        faulthandler.dump_traceback_later(SLOWEST_S, exit=True)
        if name:
            limit_memory(MEMORY_BYTES + size)
        problem = fault(stage, outcomes)
        faulthandler.cancel_dump_traceback_later()
        if problem is not None:
            found.append(f"stage {number}: {problem}")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    shutil.rmtree(directory)
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
        problems = examine(base, work, outcomes)
        assert not problems, (base.directory, problems)
    assert outcomes.pop("refused", 0) == 0
    outcomes.clear()
    last = os.open(folder / "number", os.O_WRONLY | os.O_CREAT)
    for number in range(first, first + count):
        os.pwrite(last, b"%12d" % number, 0)
        rng = random.Random(f"{seed}/{number}")
        base = rng.choice(bases)
        name, damage, content = base.damaged(rng)
        for problem in examine(base, work, outcomes, name, content):
            record = {"number": number, "base": base.directory.name, "file": name, "damage": damage}
            print(json.dumps(record | {"problem": problem[:600]}), flush=True)
    print(json.dumps({"files": count, **outcomes}))


if __name__ == "__main__":
    main()
