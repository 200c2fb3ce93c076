"""The engines of `tools/compare.py` and `tools/bench_embed.py` as processes: which can run here,
starting, asking, stopping.

This module owns the options that make the engines comparable. It must not import an engine: each
runs in its own virtual environment, by a module of `tools/peers/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click
import gguf_model

PEERS = Path(__file__).parent / "peers"
KV_CACHE_GIB = 2
MAX_MODEL_LEN = 1024
GGUF_KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_0",
}


logs_option = click.option(
    "--logs",
    type=click.Path(path_type=Path),
    default=Path("compare-logs"),
    help="Directory for the peers' logs.",
)
json_option = click.option(
    "--json", "json_file", type=click.File("w", lazy=True), help="Write all figures as JSON."
)


@dataclass(frozen=True)
class Precision:
    """How the compared engines compute.

    Attributes:
        dtype: the dtype of the weights, and of keys and values.
        quantization: "int8" or "int4" weights instead; None: weights of `dtype`.
        activation_dtype: the option of shmllm.
        loras: directories of adapters, which requests take in turns; empty: requests of the model.
    """

    dtype: str
    quantization: str | None = None
    activation_dtype: str = "auto"
    loras: tuple[str, ...] = ()


@dataclass
class Peer:
    """An inference engine to compare.

    Attributes:
        name: the name of its package.
        python: its interpreter.
        options: keyword arguments of its engine.
        environment: environment variables to add.
        quantizes: whether it can run with quantized weights.
        adapts: whether it can run requests with adapters.
        reads_gguf: whether it runs a GGUF file as it is.
        prepare: returns what it loads, from the model's directory.
        task: the first word of the name of its module in `tools/peers/`; "run" generates tokens,
            "embed" embeds texts.
    """

    name: str
    python: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    quantizes: bool = False
    adapts: bool = False
    reads_gguf: bool = False
    prepare: Callable[[Path], Path] = lambda model: model
    task: str = "run"

    def start(self, model: Path, prompts: Sequence[Any], log: TextIO) -> Running:
        """Starts the process. Call `wait_ready` of the result to wait for its first token.

        Args:
            model: the model's directory.
            prompts: the prompts as token ids, for which it generates one token at its start; of an
                embedding peer all texts, of which it embeds the first at its start.
            log: the file for its stdout and stderr.
        """
        prepared = self.prepare(model)
        read_end, write_end = os.pipe()
        began = time.monotonic()
        process = subprocess.Popen(
            [self.python, str(PEERS / f"{self.task}_{self.name}.py"), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | self.environment,
            pass_fds=[write_end],
            text=True,
            start_new_session=True,
        )
        os.close(write_end)
        running = Running(self.name, process, os.fdopen(read_end), began, log.name)
        options = self.options
        if model.is_file() and "weights" in options:
            options = options | {"weights": "gguf"}
        question = {"model": str(prepared), "options": options, "prompts": prompts}
        running.ask(question)
        return running


@dataclass
class Running:
    """A peer's process and the pipes to it.

    Attributes:
        name: the peer's name.
        process: the process; its stdin takes questions.
        answers: the pipe with its answers.
        began: monotonic time of its start, in seconds.
        log: the path of its log file.
    """

    name: str
    process: subprocess.Popen[str]
    answers: TextIO
    began: float
    log: str

    def ask(self, question: dict[str, Any]) -> None:
        """Sends a question."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer to the last question."""
        line = self.answers.readline()
        if not line:
            raise click.ClickException(f"{self.name} ended; its output is in {self.log}")
        value: dict[str, Any] = json.loads(line)
        return value

    def wait_ready(self) -> tuple[float, dict[str, Any]]:
        """Waits for the first token; returns the seconds since the start, and facts to record."""
        answer = self.answer()
        return answer["first_token_time"] - self.began, answer["facts"]

    def rate(self, prompts: list[list[int]], output_len: int) -> tuple[float, list[int]]:
        """Generates; returns the generated tokens per second, and the first prompt's tokens."""
        self.ask({"prompts": prompts, "output_len": output_len})
        answer = self.answer()
        return len(prompts) * output_len / answer["seconds"], answer["first"]

    def stop(self) -> None:
        """Ends the process, by SIGKILL after 30 s."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.answers.close()


def find_peers(pythons: Mapping[str, str | None], precision: Precision) -> list[Peer]:
    """The peers that can run; reports the others on stderr.

    Args:
        pythons: the interpreter of each peer by name; None: it was not given.
        precision: how all of them compute.
    """
    found = []
    for peer in candidates(pythons, precision):
        reason = missing(peer, precision)
        if reason is None:
            found.append(peer)
        else:
            click.echo(f"without {peer.name}: {reason}", err=True)
    return found


def candidates(pythons: Mapping[str, str | None], precision: Precision) -> list[Peer]:
    """All peers, with the options that make them comparable."""
    cores = sorted(os.sched_getaffinity(0))
    dtype, quantization = precision.dtype, precision.quantization
    gguf_kind = GGUF_KINDS[quantization or dtype]
    ours = {
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_GIB * 2**30,
        "quantization": quantization,
        "activation_dtype": precision.activation_dtype,
    }
    adapting = lora_options(precision.loras)
    openvino = {"dtype": dtype, "quantization": quantization, "kv_cache_gib": KV_CACHE_GIB}
    vllm_environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
    }

    def python(name: str) -> str:
        return pythons.get(name) or ""

    return [
        Peer(
            "shmllm",
            python("shmllm"),
            ours | adapting,
            quantizes=True,
            adapts=True,
            reads_gguf=True,
        ),
        Peer(
            "vllm",
            python("vllm"),
            {"dtype": dtype, "max_model_len": MAX_MODEL_LEN} | adapting,
            vllm_environment,
            adapts=True,
        ),
        Peer("openvino_genai", python("openvino_genai"), openvino, quantizes=True),
        Peer(
            "llama_cpp",
            python("llama_cpp"),
            {"weights": gguf_kind},
            quantizes=True,
            reads_gguf=True,
            prepare=lambda model: model if model.is_file() else gguf_model.cached(model, gguf_kind),
        ),
        Peer("transformers", python("transformers"), {"dtype": dtype}),
    ]


def lora_options(loras: tuple[str, ...]) -> dict[str, Any]:
    """The options of shmllm and vLLM for these adapters, and the list of them as `loras`."""
    if not loras:
        return {}
    configs = [json.loads((Path(lora) / "adapter_config.json").read_text()) for lora in loras]
    return {
        "enable_lora": True,
        "max_loras": len(loras),
        "max_lora_rank": max(16, *(config["r"] for config in configs)),
        "loras": list(loras),
    }


def missing(peer: Peer, precision: Precision) -> str | None:
    """The reason why a peer cannot run here; None if it can."""
    if precision.quantization is not None and not peer.quantizes:
        return f"it is compared only without --quantization, which is {precision.quantization}"
    if precision.loras and not peer.adapts:
        return "it is compared only without --lora"
    if not peer.python:
        option = peer.name.replace("_", "-")
        return f"no --{option} PYTHON; --help says how to make its virtual environment"
    probe = "import importlib.util,sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run([peer.python, "-c", probe, peer.name], cwd="/", capture_output=True)
    except OSError as problem:
        return f"{peer.python}: {problem.strerror}"
    return None if done.returncode == 0 else f"{peer.python} has no package {peer.name}"
