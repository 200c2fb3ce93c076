"""JSON lines in, JSON lines out, for files of any length: rows are taken as there is room for
them. `shmllm generate -i INPUT -o OUTPUT` does this, and goes on after an interruption.

    python batch_file.py [INPUT [OUTPUT]]

A line of the input holds `prompt`, and perhaps `max_tokens` and `id`. Without INPUT,
prompts.jsonl is written here first.
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
    records = [{"id": n, "prompt": p, "max_tokens": 8 * (n + 1)} for n, p in enumerate(prompts)]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))


def params_of(record):
    return SamplingParams(temperature=0, max_tokens=record.get("max_tokens", 64))


num_done = num_tokens = 0
with LLM() as llm, source.open() as lines, target.open("w") as out:
    # Three views of one pass: they hold what is between the first of them and the last.
    asked, wanted, answered = tee((json.loads(line) for line in lines if line.strip()), 3)
    outputs = llm.stream((r["prompt"] for r in asked), map(params_of, wanted), ordered=True)
    for record, output in zip(answered, outputs, strict=True):
        completion = output.outputs[0]
        result = {"text": completion.text, "finish_reason": completion.finish_reason}
        out.write(json.dumps(record | result) + "\n")
        num_done += 1
        num_tokens += len(completion.token_ids)

print(f"{num_done} prompts, {num_tokens} tokens: {source} -> {target}")
