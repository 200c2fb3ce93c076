"""The program that compute-sanitizer watches: attention of a few tokens, with large tiles."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.clock import synchronize
from gpu.settings import settings_for

STEPS = ((3, 1, 150), (1, 130, 150))  # requests, query, context


def main() -> None:
    settings = replace(settings_for("--rehearse" in sys.argv), rotated_bytes=1)
    for dim in settings.tile_dims:
        for step in STEPS:
            case = AttentionCase(AttentionSizes(*settings.tile_heads, dim, *step), settings)
            case.launches(*case.current())[0]()
            synchronize(torch.device(settings.device))
    print("all launches are done", flush=True)


if __name__ == "__main__":
    main()
