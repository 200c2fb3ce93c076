"""A batch job of a million rows, and its --resume, need hardly more memory than a small one.

The code of the command runs with a fake engine that answers at once.
SHMLLM_BATCH_ROWS sets how many rows (1,000,000).
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest
from support.programs import result_of, run_source

pytestmark = pytest.mark.slow

NUM_ROWS = int(os.environ.get("SHMLLM_BATCH_ROWS", "1000000"))
FEW_ROWS = 10_000
# A bit and four bytes a line, twice while the second is allocated, and what an allocator adds.
MOST_BYTES_PER_ROW = 24
MOST_EXTRA_BYTES = 32 * 2**20

JOB = """
import json, sys, time
from contextlib import nullcontext
from collections import deque
from shmllm.cli.batch import run_batch
from shmllm.cli.plan import look_at, make_plan
from shmllm.outputs.request import CompletionOutput, RequestOutput

source, target, resume = sys.argv[1:]

class Model:
    model_defaults = {}

    def stream(self, prompts, params, ordered, on_error):
        held = deque()
        for place, pair in enumerate(zip(prompts, params)):
            held.append((place, pair[0]))
            if len(held) == 512:
                yield self.answer(*held.popleft())
        while held:
            yield self.answer(*held.popleft())

    def answer(self, place, prompt):
        one = CompletionOutput(0, prompt[::-1], [1, 2, 3], finish_reason="stop")
        output = RequestOutput("", prompt, [1, 2], None, [one], True)
        output.prompt_index = place
        return output

class Session:
    def open(self):
        return nullcontext(Model())

    def describe_engine(self, llm):
        pass

options = dict.fromkeys(
    "as_json ordered overwrite token_ids openai_batch logprobs echo chat system".split()
) | {"target": target, "resume": bool(resume)}
began = time.monotonic()
code = run_batch(make_plan(look_at(source), [], options), {}, Session())
assert code == 1, code
seconds = time.monotonic() - began
# Not getrusage: what that says may be of the process that started this one.
peak = next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM")) * 1024
print(json.dumps({"peak": peak, "seconds": seconds}))
"""


def write_rows(path: Path, num: int) -> None:
    """Write typical rows; every thousandth is bad."""
    with path.open("w") as out:
        for i in range(num):
            row = {"id": f"row-{i}", "prompt": f"value_{i} = ", "split": "train"}
            out.write("bad\n" if i % 1000 == 999 else json.dumps(row) + "\n")


def cut(path: Path, num_lines: int) -> None:
    """Cut the file after some lines and a part of another."""
    with path.open("rb+") as stream:
        size = sum(len(line) for line in islice(stream, num_lines))
        stream.truncate(size + 9)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = {}
    for num in (FEW_ROWS, NUM_ROWS):
        source, target = tmp_path / f"{num}.jsonl", tmp_path / f"{num}.out.jsonl"
        write_rows(source, num)
        for resume in ("", "resume"):
            if resume:
                cut(target, num // 2)
            done = result_of(run_source(JOB, str(source), str(target), resume, timeout=3600))
            peaks[num, resume] = done["peak"]
            rate = num / done["seconds"]
            print(f"{num:,} rows {resume}: {done['peak'] / 2**20:.1f} MiB, {rate:,.0f} rows/s")
            with target.open("rb") as stream:
                assert sum(1 for _ in stream) == num
    for resume in ("", "resume"):
        growth = peaks[NUM_ROWS, resume] - peaks[FEW_ROWS, resume]
        assert growth < MOST_BYTES_PER_ROW * NUM_ROWS + MOST_EXTRA_BYTES
