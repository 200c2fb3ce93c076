"""tools/trace_picture.py draws what a trace's file holds."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.programs import CLI, python

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TOOL = Path(__file__).resolve().parents[2] / "tools" / "trace_picture.py"
SOURCE = """
from shmllm import LLM, SamplingParams
with LLM("tiny", num_threads=1, kv_cache_memory_bytes=2**27) as llm:
    llm.generate(["import os", "x"], SamplingParams(max_tokens=60, ignore_eos=True))
"""


def test_a_picture_of_a_real_trace(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
    done = python("-c", CLI, "trace", "-o", str(trace), "--", sys.executable, "-c", SOURCE)
    assert done.returncode == 0, done.stderr.decode()
    drawn = python(str(TOOL), str(trace), str(picture), "--from-step", "0", "--to-step", "20")
    assert drawn.returncode == 0, drawn.stderr.decode()
    texts = [e.text for e in ElementTree.parse(picture).iter() if e.text]
    assert {"front end", "engine", "request 0", "request 1"} <= set(texts)
    for phase in ("execute", "prefill", "decode", "send OUTPUTS"):
        assert any(text.startswith(f"{phase}: ") for text in texts), phase
