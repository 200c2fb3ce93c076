#!/usr/bin/env python3
"""The picture of `shmllm top` in docs/top.md, from a real engine at work.

    python tools/top_picture.py docs/results/top.svg

Starts a named engine and two programs that use it, follows it as `shmllm top` does, and exports
the screen.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from shmllm.monitor.find import choose, find_engines
from shmllm.monitor.screen import engine_screen
from shmllm.monitor.track import Track

CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
CLIENT = """
import sys
from shmllm import LLM, SamplingParams
name, width = sys.argv[1], int(sys.argv[2])
params = SamplingParams(temperature=0.7, max_tokens=90, ignore_eos=True)
with LLM.attach(name) as llm:
    prompts = ("import os\\n" * 12 + f"def function_{i}(" for i in range(10**9))
    for output in llm.stream(prompts, params, max_in_flight=width):
        pass
"""
WIDTH = 112


@contextlib.contextmanager
def engine_at_work(directory: str) -> Iterator[str]:
    """The name of an engine with two front ends."""
    name = "main"
    subprocess.run([*CLI, "engine", "start", name, "--detach"], check=True)
    clients = []
    try:
        for program, width in (("summarize.py", 12), ("label.py", 4)):
            path = Path(directory) / program
            path.write_text(CLIENT)
            command = [sys.executable, program, name, str(width)]
            clients.append(subprocess.Popen(command, cwd=directory))
        yield name
    finally:
        for client in clients:
            client.kill()
            client.wait()
        subprocess.run([*CLI, "engine", "stop", name], check=True)


@click.command()
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", default=20.0, show_default=True)
@click.option("--interval", default=1.0, show_default=True)
def main(target: Path, seconds: float, interval: float) -> None:
    """Write TARGET, an SVG."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as directory, engine_at_work(directory) as name:
        engine = choose(find_engines(), name)
        assert engine is not None
        track = Track(engine)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or not track.figures["ttft_ms"]["interval"]["count"]:
            time.sleep(interval)
            track.update()
        keys = "q quit   + - faster, slower"
        console.print(engine_screen(track.figures, track.history, name, keys))
        track.close()
    svg = console.export_svg(title=f"shmllm top {name}")
    # It would load fonts from elsewhere; the viewer's own do.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL)
    target.write_text(re.sub(r"[ \t]+\n", "\n", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
