"""The main loops of peers of `tools/compare.py` and `tools/bench_embed.py`: a peer reads and writes
one JSON value per line.

It runs in the peer's virtual environment and therefore imports only the standard library. Answers
go through a separate file descriptor, so that output of the peer's libraries cannot mix with them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts as token ids, number of tokens to generate for each) -> the tokens of each prompt.

Decoding is greedy and does not stop early.
"""

Embed = Callable[..., Any]
"""(texts, settings as keyword arguments) -> the embeddings, float32 [texts, width] in NumPy."""


def serve(load: Callable[[str, dict[str, Any]], tuple[Generate, dict[str, Any]]]) -> None:
    """Loads the model once, then times generations until the driver closes the pipe.

    Args:
        load: (model directory or file, options) -> the generate function, and facts to record:
            at least the version, and the precision of the weights and of keys and values
            ("weights", "kv_cache").
    """
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    question = json.loads(sys.stdin.readline())
    generate, facts = load(question["model"], question["options"])
    tokens = generate(question["prompts"], 1)
    answers.write(json.dumps({"first_token_time": time.monotonic(), "facts": facts}) + "\n")
    assert [len(each) for each in tokens] == [1] * len(question["prompts"])
    for line in sys.stdin:
        question = json.loads(line)
        began = time.monotonic()
        tokens = generate(question["prompts"], question["output_len"])
        seconds = time.monotonic() - began
        assert all(len(each) == question["output_len"] for each in tokens)
        answers.write(json.dumps({"seconds": seconds, "first": tokens[0]}) + "\n")


def serve_embeddings(load: Callable[[str, dict[str, Any]], tuple[Embed, dict[str, Any]]]) -> None:
    """Loads the model once, then times embedding texts until the driver closes the pipe.

    Args:
        load: (model directory, options) -> the embed function, and facts to record: at least the
            version ("version"), the dtype it computes in ("dtype"), and the settings to choose from
            ("settings", a list of keyword arguments of the embed function).
    """
    import numpy as np

    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    question = json.loads(sys.stdin.readline())
    texts = question["prompts"]
    embed, facts = load(question["model"], question["options"])
    embed(texts[:1], **facts["settings"][0])
    answers.write(json.dumps({"first_token_time": time.monotonic(), "facts": facts}) + "\n")
    for line in sys.stdin:
        question = json.loads(line)
        asked = [texts[row] for row in question["rows"]]
        began = time.monotonic()
        vectors = embed(asked, **question["settings"])
        seconds = time.monotonic() - began
        assert len(vectors) == len(asked)
        if question["file"] is not None:
            np.save(question["file"], vectors)
        answers.write(json.dumps({"seconds": seconds}) + "\n")


def turns(loras: list[Any], count: int) -> list[Any] | None:
    """The adapters of `count` requests that take them in turns; None if there are none."""
    return [loras[i % len(loras)] for i in range(count)] if loras else None
