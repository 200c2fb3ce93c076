"""JSON lines in, JSON lines out, a chunk at a time, so that the file may be of any length.

    python batch_file.py [INPUT [OUTPUT]]

A line of the input holds `prompt`, and perhaps `max_tokens` and `id`. Without INPUT,
prompts.jsonl is written here first.
"""

import json
import sys
from itertools import islice
from pathlib import Path

from shmllm import LLM, SamplingParams

CHUNK = 1000

source = Path(sys.argv[1] if len(sys.argv) > 1 else "prompts.jsonl")
target = Path(sys.argv[2] if len(sys.argv) > 2 else "completions.jsonl")
if len(sys.argv) == 1:
    prompts = [f"def {name}(items):" for name in ("first", "last", "count", "merge")]
    records = [{"id": n, "prompt": p, "max_tokens": 8 * (n + 1)} for n, p in enumerate(prompts)]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))

num_done = num_tokens = 0
with LLM() as llm, source.open() as lines, target.open("w") as out:
    parsed = (json.loads(line) for line in lines if line.strip())
    while chunk := list(islice(parsed, CHUNK)):
        outputs = llm.generate(
            [r["prompt"] for r in chunk],
            [SamplingParams(temperature=0, max_tokens=r.get("max_tokens", 64)) for r in chunk],
        )
        for record, output in zip(chunk, outputs, strict=True):
            completion = output.outputs[0]
            result = {"text": completion.text, "finish_reason": completion.finish_reason}
            out.write(json.dumps(record | result) + "\n")
            num_tokens += len(completion.token_ids)
        num_done += len(chunk)

print(f"{num_done} prompts, {num_tokens} tokens: {source} -> {target}")
