"""Which frames are used and how large they become, compared with transformers."""

from __future__ import annotations

import random
from time import process_time
from typing import Any

import pytest
from support.video_processors import SMART_RESIZE, sampled, sampled_of_glm

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.videos.rules.family import VideoRules
from shmllm.frontend.videos.rules.registry import FAMILIES, rules_of_model

QWEN2, QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
NAMES = [QWEN2, QWEN3]
GLM, GLM46 = "Glm4vVideoProcessor", "Glm46VVideoProcessor"


def rules(name: str, changes: dict[str, Any] | None = None, **fields: Any) -> VideoRules:
    return FAMILIES[name].of(settings_of(fields, "file", name), changes or {})


@pytest.mark.parametrize("name", NAMES)
def test_frames_of_a_rate_are_those_of_transformers(name: str) -> None:
    draw = random.Random(1)
    lengths = set()
    for _ in range(400):
        fields = {
            "fps": draw.choice([0.3, 1, 2, 2.5, 7, 30]),
            "min_frames": draw.choice([2, 4, 5, 10]),
            "max_frames": draw.choice([10, 16, 33, 768]),
        }
        total, rate = draw.randint(2, 900), draw.choice([1, 5, 10.0, 23.976, 29.97, 60])
        found = rules(name, **fields).choose(total, rate)
        assert found == sampled(name, total, rate, fields), (total, rate, fields)
        assert rules(name, fields).choose(total, rate) == found, "of a request"
        lengths.add(len(found))
    assert len(lengths) > 20


def test_frames_of_glm_are_those_of_transformers() -> None:
    draw = random.Random(4)
    lengths = set()
    for _ in range(400):
        fields = {"fps": draw.choice([0.3, 1, 2, 2.5, 7]), "max_duration": draw.choice([5, 300])}
        total, rate = draw.randint(2, 900), draw.choice([1, 5, 10.0, 23.976, 29.97, 60])
        found = rules(GLM, **fields).choose(total, rate)
        assert found == sampled_of_glm(GLM, total, rate, fields), (total, rate, fields)
        assert rules(GLM, fields).choose(total, rate) == found, "of a request"
        lengths.add(len(found))
    assert len(lengths) > 20


def test_frames_of_glm_4_6v_are_those_of_transformers() -> None:
    """Of videos of seconds, minutes and an hour."""
    draw = random.Random(5)
    lengths = set()
    for _ in range(400):
        total = draw.choice([draw.randint(2, 90), draw.randint(90, 2000), draw.randint(2000, 9000)])
        rate = draw.choice([1, 2.5, 5, 10.0, 23.976, 29.97, 60])
        found = rules(GLM46).choose(total, rate)
        assert found == (sampled_of_glm(GLM46, total, rate, {}) or [0]), (total, rate)
        lengths.add(len(found))
    assert len(lengths) > 20


def test_a_rate_above_that_of_a_video_takes_all_of_its_frames_at_once() -> None:
    begin_s = process_time()
    assert rules(GLM, {"fps": 1e5}).choose(9000, 30.0) == [*range(9000)]
    assert process_time() - begin_s < 1


@pytest.mark.parametrize("name", [GLM, GLM46])
def test_a_single_frame_of_glm_is_used(name: str) -> None:
    for rate in (0.5, 25, 1000):
        assert rules(name).choose(1, rate) == [0]


@pytest.mark.parametrize(
    ("name", "changes"), [(GLM, {"num_frames": 4}), (GLM, {"max_pixels": 9}), (GLM46, {"fps": 3})]
)
def test_what_glm_does_not_choose_by_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"'{next(iter(changes))}' is not supported for videos"):
        rules(name, changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_number_of_frames_is_that_of_transformers(name: str) -> None:
    draw = random.Random(2)
    for _ in range(300):
        total = draw.randint(4, 900)
        count = draw.randint(2, min(total - 1, 700))
        expected = sampled(name, total, 25, {"num_frames": count})
        assert rules(name, num_frames=count).choose(total, 25) == expected, (total, count)
        assert rules(name, {"num_frames": count}, fps=3).choose(total, 25) == expected


@pytest.mark.parametrize("name", NAMES)
def test_indices_are_those_of_frames(name: str) -> None:
    """Also where transformers has an error: of one frame, or of more than there are."""
    for total in [*range(1, 60), 107, 214, 1000]:
        for count in [1, 2, 3, 4, 7, 50, 1200]:
            for changes in ({"num_frames": count}, {"fps": float(count)}):
                found = rules(name, changes).choose(total, 20)
                assert found == sorted(found)
                assert found[0] == 0
                assert len(found) <= max(total, 1)
                assert found[-1] < total


@pytest.mark.parametrize("name", [*NAMES, GLM])
def test_sizes_are_those_of_transformers(name: str) -> None:
    draw = random.Random(3)
    kinds = {"smaller": 0, "larger": 0, "as it is": 0}
    for _ in range(600):
        patch, merge = draw.choice([(14, 2), (16, 2), (8, 3)])
        factor = patch * merge
        fewest = draw.choice([1, 56 * 56, 128 * 28 * 28, 10**6])
        most = fewest * draw.choice([1, 4, 30])
        width, height, frames = draw.randint(1, 700), draw.randint(1, 700), draw.randint(2, 40)
        if max(width, height) > 190 * min(width, height):
            continue
        found = rules(
            name,
            patch_size=patch,
            merge_size=merge,
            size={"shortest_edge": fewest, "longest_edge": most},
        ).size_of(width, height, frames)
        fields: dict[str, Any] = {"factor": factor, "min_pixels": fewest, "max_pixels": most}
        if name != QWEN2:
            fields |= {"num_frames": frames, "temporal_factor": 2}
        assert found[::-1] == SMART_RESIZE[name](height=height, width=width, **fields)
        ratio = found[0] * found[1] / (width * height)
        kinds["smaller" if ratio < 0.7 else "larger" if ratio > 1.4 else "as it is"] += 1
    assert min(kinds.values()) > 20, kinds


@pytest.mark.parametrize("name", [*NAMES, GLM])
def test_narrow_frames_are_refused_where_transformers_refuses_them(name: str) -> None:
    for width, height in [(9000, 40), (40, 9000)]:
        with pytest.raises(RequestError, match=f"{width}x{height} pixels .* too narrow"):
            rules(name).size_of(width, height, 4)


def test_a_single_frame_of_qwen_3_has_a_size() -> None:
    """transformers refuses it; it is repeated."""
    assert rules(QWEN3).size_of(512, 512, 1) == rules(QWEN3).size_of(512, 512, 2)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_pixels_may_be_changed_one_by_one(name: str) -> None:
    size = {"shortest_edge": 5000, "longest_edge": 70000}
    for changes, bounds in (
        ({}, (5000, 70000)),
        ({"min_pixels": 6000}, (6000, 70000)),
        ({"max_pixels": 60000}, (5000, 60000)),
        ({"size": {"longest_edge": 60000}}, (5000, 60000)),
    ):
        found = rules(name, changes, size=size).of_frames
        assert (found.fewest, found.most) == bounds


@pytest.mark.parametrize("name", NAMES)
def test_rules_that_a_request_does_not_change_are_equal(name: str) -> None:
    first = rules(name, fps=3)
    assert first == rules(name, {"fps": 3}, fps=3) == rules(name, {"fps": 3.0})
    assert repr(first) == repr(rules(name, {"fps": 3}))
    others: list[dict[str, Any]] = [
        {"fps": 4},
        {"num_frames": 8},
        {"min_frames": 6},
        {"max_frames": 9},
        {"do_resize": False},
        {"do_sample_frames": name == QWEN2},
        {"resample": 2},
        {"max_pixels": 10**6},
    ]
    found = [rules(name, each, fps=3) for each in others]
    assert len({repr(each) for each in [first, *found]}) == 1 + len(others)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": 2, "num_frames": 8}, "'fps' and 'num_frames' exclude each other"),
        ({"fsp": 2}, r"'fsp' is not supported for videos; did you mean 'fps'\? Supported are do_r"),
        ({3: 2}, r"3 is not supported for videos; did you mean .[a-z_]+.\? Supported are"),
        ({"fps": 0}, "'fps' must be a positive number, not 0"),
        ({"fps": float("nan")}, "'fps' must be a positive number, not nan"),
        ({"fps": 1e-300}, "'fps' must be from 1e-06 to 1,048,576, not 1e-300"),
        ({"fps": True}, "'fps' must be a positive number, not True"),
        ({"fps": "2"}, "'fps' must be a positive number"),
        ({"num_frames": 0}, "'num_frames' must be a positive integer, not 0"),
        ({"num_frames": 2.5}, "'num_frames' must be a positive integer"),
        ({"max_frames": -1}, "'max_frames' must be a positive integer"),
        ({"do_sample_frames": 1}, "'do_sample_frames' must be true or false"),
        ({"size": {"height": 3, "width": 3}}, "'size' must have the keys"),
        ({"max_pixels": 0}, "must be a positive integer, not 0"),
    ],
)
def test_wrong_changes_are_refused(name: str, changes: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rules(name, changes)


def test_an_unknown_name_that_is_like_none_has_no_hint() -> None:
    with pytest.raises(RequestError, match="'zzzzzz' is not supported for videos") as raised:
        rules(QWEN2, {"zzzzzz": 1})
    assert "None" not in str(raised.value)


def test_a_wrong_field_of_a_file_names_the_file() -> None:
    with pytest.raises(EngineStartError, match=r"^the file: 'fps' must be a positive number"):
        rules_of_model(settings_of({"fps": -1}, "the file", QWEN3))
