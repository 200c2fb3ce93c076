"""A peer's end of the pipe to `tools/compare.py`: one JSON value a line, both ways.

Runs in the peer's virtual environment, so it imports the standard library alone. Answers
go through a descriptor of their own: what a peer's libraries print cannot get between them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts as token ids, tokens wanted of each) -> the tokens, greedy, no early stop."""


def serve(load: Callable[[str, dict[str, Any]], tuple[Generate, dict[str, Any]]]) -> None:
    """Load the model once, then time generations until the driver closes the pipe.

    Args:
        load: (model directory, options) -> what generates, and facts worth recording.
    """
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    question = json.loads(sys.stdin.readline())
    generate, facts = load(question["model"], question["options"])
    tokens = generate(question["first_prompts"], 1)
    answers.write(json.dumps({"first_token_time": time.monotonic(), "facts": facts}) + "\n")
    assert [len(each) for each in tokens] == [1] * len(question["first_prompts"])
    for line in sys.stdin:
        question = json.loads(line)
        began = time.monotonic()
        tokens = generate(question["prompts"], question["output_len"])
        seconds = time.monotonic() - began
        assert all(len(each) == question["output_len"] for each in tokens)
        answers.write(json.dumps({"seconds": seconds, "first": tokens[0]}) + "\n")
