"""Complete a file of JSON lines of any length: rows are read when the engine has room for them.

    python batch_file.py [INPUT [OUTPUT]]

A line of the input holds `prompt`, and optionally `max_tokens` and `id`. Without INPUT, the program
first writes prompts.jsonl to the current directory. `shmllm generate -i INPUT -o OUTPUT` generates
the same texts and can also resume an interrupted run.
"""

import json
import sys
from itertools import tee
from pathlib import Path

from shmllm import LLM, SamplingParams

source = Path(sys.argv[1] if len(sys.argv) > 1 else "prompts.jsonl")
target = Path(sys.argv[2] if len(sys.argv) > 2 else "completions.jsonl")
if len(sys.argv) == 1:
    prompts = [f"def {name}(items):" for name in ("first", "last", "count", "merge")]
    example = [{"id": n, "prompt": p, "max_tokens": 8 * (n + 1)} for n, p in enumerate(prompts)]
    source.write_text("".join(json.dumps(row) + "\n" for row in example))


def params_of(row):
    return SamplingParams(temperature=0, max_tokens=row.get("max_tokens", 128))


num_done = num_tokens = 0
with LLM() as llm, source.open() as lines, target.open("w") as out:
    # Three iterators over one pass: `tee` keeps the rows between the fastest and the slowest.
    for_prompts, for_params, rows = tee((json.loads(line) for line in lines if line.strip()), 3)
    prompts = (row["prompt"] for row in for_prompts)
    outputs = llm.stream(prompts, map(params_of, for_params), ordered=True)
    for row, output in zip(rows, outputs, strict=True):
        completion = output.outputs[0]
        result = {"text": completion.text, "finish_reason": completion.finish_reason}
        out.write(json.dumps(row | result) + "\n")
        num_done += 1
        num_tokens += len(completion.token_ids)

print(f"{num_done} prompts, {num_tokens} tokens: {source} -> {target}")
