"""Positions of images with slices, compared with those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from shmllm.models.vision.canvas import CanvasMarks
from shmllm.worker.canvas_positions import CanvasPositions
from shmllm.worker.rope_positions import PlacedGrid

MARKS = CanvasMarks(*range(1, 6))
PAD, MERGE = 9, 4
Sides = tuple[int, int]


def picture(whole: Sides, *rows: tuple[Sides, ...]) -> tuple[list[int], list[Sides]]:
    """The tokens of an image and the sides of its parts, in embeddings."""

    def part(begin: int, sides: Sides, end: int) -> list[int]:
        return [begin, *[PAD] * (sides[0] * sides[1]), end]

    tokens = part(MARKS.image_begin, whole, MARKS.image_end)
    for number, row in enumerate(rows):
        tokens += [MARKS.newline] * (number > 0)
        for sides in row:
            tokens += part(MARKS.slice_begin, sides, MARKS.slice_end)
    return tokens, [whole, *(sides for row in rows for sides in row)]


def text(count: int) -> tuple[list[int], list[Sides]]:
    return [77] * count, []


NEWLINE: tuple[list[int], list[Sides]] = ([MARKS.newline], [])
SLICE: tuple[list[int], list[Sides]] = ([MARKS.slice_begin], [])
PROMPTS = {
    "a whole": [text(4), picture((3, 5)), text(3)],
    "at both ends": [picture((2, 2)), text(1), picture((5, 3))],
    "slices in one row": [text(1), picture((2, 4), ((3, 3), (3, 3), (3, 3))), text(2)],
    "slices in rows": [text(6), picture((4, 3), ((5, 4),) * 2, ((5, 4),) * 2, ((5, 4),) * 2)],
    "slices in a column": [text(2), picture((4, 2), ((3, 4),), ((3, 4),)), text(2)],
    "slices of several sizes": [picture((3, 3), ((3, 4), (3, 5)), ((2, 4), (2, 5))), text(2)],
    "an odd number": [text(1), picture((3, 3), ((3, 4), (3, 5)), ((2, 4),)), text(2)],
    "neighbours": [text(2), picture((2, 3)), picture((3, 2), ((4, 4),) * 2), text(1)],
    "newlines behind": [text(2), picture((2, 3)), NEWLINE, NEWLINE, picture((3, 2)), NEWLINE],
    "a mark without a slice": [text(2), SLICE, picture((2, 3)), text(1), SLICE, text(2)],
    "no image": [text(5), SLICE, NEWLINE],
}


def wanted_of(tokens: list[int], sides: list[Sides]) -> tuple[Any, int]:
    """transformers' positions, (3, T), and what it adds to the index of a token behind."""
    names = ("image_start", "image_end", "slice_start", "slice_end", "newline")
    ids = {f"{name}_id": token for name, token in zip(names, MARKS, strict=True)}
    own = SimpleNamespace(config=SimpleNamespace(downsample_mode="16x", **ids))
    for name in ("_group_visual_frames", "get_vision_position_ids"):
        setattr(own, name, getattr(MiniCPMV4_7Model, name).__get__(own))
    own._frame_end_idx = MiniCPMV4_7Model._frame_end_idx
    found = torch.tensor([tokens])
    sizes = torch.tensor(sides) * MERGE if sides else torch.zeros(0, 2, dtype=torch.long)
    positions, delta = MiniCPMV4_7Model.get_rope_index(
        own, found, mm_token_type_ids=(found == PAD).long(), target_sizes=sizes
    )
    return positions[:, 0].numpy(), int(delta[0, 0])


def grids_of(tokens: list[int], sides: list[Sides]) -> list[PlacedGrid]:
    begins = [
        index
        for index, token in enumerate(tokens)
        if token == PAD and (not index or tokens[index - 1] != PAD)
    ]
    return [PlacedGrid(at, 1, *each) for at, each in zip(begins, sides, strict=True)]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_they_equal_those_of_transformers_in_any_chunks(size: int) -> None:
    known, wanted = CanvasPositions(len(PROMPTS), MARKS), []
    for row, parts in enumerate(PROMPTS.values()):
        tokens = [token for part in parts for token in part[0]]
        sides = [each for part in parts for each in part[1]]
        known.update(row, grids_of(tokens, sides), tokens)
        prompt, delta = wanted_of(tokens, sides)
        behind = np.arange(len(tokens), len(tokens) + 5) + delta
        wanted.append(np.concatenate([prompt, np.broadcast_to(behind, (3, 5))], 1))
    for begin in range(0, max(each.shape[1] for each in wanted), size):
        parts = [each[:, begin : begin + size] for each in wanted]
        rows = np.repeat(np.arange(len(parts)), [part.shape[1] for part in parts])
        places = np.concatenate([begin + np.arange(part.shape[1]) for part in parts])
        assert known.fill(rows, places).tolist() == np.concatenate(parts, 1).tolist()


def test_random_pictures_equal_those_of_transformers() -> None:
    draw = np.random.default_rng(3)

    def sides() -> Sides:
        return int(draw.integers(1, 9)), int(draw.integers(1, 9))

    for _ in range(150):
        parts = [text(int(draw.integers(0, 4)))]
        for _ in range(draw.integers(1, 4)):
            each = sides()
            rows = ((each,) * int(draw.integers(1, 4)),) * int(draw.integers(0, 4))
            parts += [picture(sides(), *rows), text(int(draw.integers(0, 3)))]
        tokens = [token for part in parts for token in part[0]]
        of_parts = [each for part in parts for each in part[1]]
        known, indices = CanvasPositions(1, MARKS), np.arange(len(tokens) + 1)
        known.update(0, grids_of(tokens, of_parts), tokens)
        found = known.fill(np.zeros_like(indices), indices)
        expected, delta = wanted_of(tokens, of_parts)
        assert found[:, :-1].tolist() == expected.tolist()
        assert found[:, -1].tolist() == [len(tokens) + delta] * 3


def test_a_row_forgets_its_request() -> None:
    known, indices = CanvasPositions(2, MARKS), np.arange(12)
    tokens, sides = picture((3, 3))
    known.update(1, grids_of(tokens, sides), tokens)
    assert known.fill(np.zeros_like(indices), indices).tolist() == [indices.tolist()] * 3
    assert known.fill(np.ones_like(indices), indices)[:, 0].tolist() == [0, 0, 0]
    assert known.fill(np.ones_like(indices), indices)[:, 11].tolist() == [4, 4, 4]
    known.update(1, [], tokens)
    assert known.fill(np.ones_like(indices), indices).tolist() == [indices.tolist()] * 3


def test_an_image_at_the_first_token_has_no_mark_before_it() -> None:
    known, indices = CanvasPositions(1, MARKS), np.arange(6)
    known.update(0, [PlacedGrid(0, 1, 2, 2)], [PAD] * 4)
    found = known.fill(np.zeros_like(indices), indices)
    assert found.tolist() == [[0, 0, 0, 0, 2, 3], [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3]]
