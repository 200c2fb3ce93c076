"""Settings of video processors: the order of the files, and the defaults of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.video_processors import CLASSES

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import settings_of
from shmllm.formats.video_settings import read_video_settings

QWEN2, QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
NAMES = [QWEN2, QWEN3, "Glm4vVideoProcessor", "Glm46VVideoProcessor", "MuseGlimmerVideoProcessor"]


def write(directory: Path, name: str, values: Any) -> None:
    (directory / name).write_text(json.dumps(values))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_without_fields_has_the_defaults_of_the_class(name: str, tmp_path: Path) -> None:
    write(tmp_path, "video_preprocessor_config.json", {})
    read = read_video_settings(tmp_path, [name])
    assert read is not None
    assert read.processor == name
    expected = CLASSES[name]
    compared = 0
    for field, value in read.options.items():
        if (name, field) != (QWEN2, "fps"):  # None, with which it cannot choose frames
            assert value == getattr(expected, field), field
            compared += 1
    assert compared > 7
    assert read.mean == tuple(expected.image_mean)
    assert read.std == tuple(expected.image_std)
    assert (read.do_rescale, read.do_normalize) == (expected.do_rescale, expected.do_normalize)
    assert read.rescale_factor == expected.rescale_factor


def test_the_video_processors_own_file_counts_first(tmp_path: Path) -> None:
    assert read_video_settings(tmp_path, [QWEN3]) is None
    files: list[tuple[str, Any]] = [
        ("preprocessor_config.json", {"fps": 3, "image_processor_type": "Qwen2VLImageProcessor"}),
        (
            "processor_config.json",
            {"video_processor": {"fps": 4}, "image_processor": {"fps": 9}},
        ),
        ("video_preprocessor_config.json", {"fps": 5, "video_processor_type": QWEN3}),
    ]
    for rate, (file, values) in enumerate(files, 3):
        write(tmp_path, file, values)
        read = read_video_settings(tmp_path, [QWEN3])
        assert read is not None
        assert (read.options["fps"], read.where) == (rate, str(tmp_path / file))
        assert read.processor == QWEN3, "also where a file names the image processor"


def test_a_processor_config_without_videos_leaves_the_older_file(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", {"fps": 3})
    write(tmp_path, "processor_config.json", {"image_processor": {"fps": 9}})
    read = read_video_settings(tmp_path, [QWEN2])
    assert read is not None
    assert read.options["fps"] == 3


def test_a_file_names_one_of_the_models_classes(tmp_path: Path) -> None:
    for name, expected in ((None, QWEN3), (QWEN2, QWEN2), (QWEN3, QWEN3)):
        write(tmp_path, "video_preprocessor_config.json", {"video_processor_type": name})
        read = read_video_settings(tmp_path, [QWEN3, QWEN2])
        assert read is not None
        assert read.processor == expected


def test_a_field_that_is_null_has_its_default() -> None:
    assert settings_of({"max_frames": None}, "file", QWEN3).options["max_frames"] == 768


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"video_processor_type": QWEN2}, rf"'{QWEN2}' is not '{QWEN3}'"),
        ({"video_processor_type": 3}, f"video_processor_type 3 is not '{QWEN3}'"),
        ({"image_mean": [1, 2]}, "'image_mean' must have 3 numbers"),
        ({"do_rescale": "yes"}, "'do_rescale' must be true or false"),
        ([1], "must hold a JSON object, not list"),
    ],
)
def test_wrong_values_are_refused_with_the_file(values: Any, message: str, tmp_path: Path) -> None:
    file = "video_preprocessor_config.json"
    write(tmp_path, file, values)
    with pytest.raises(EngineStartError, match=message) as raised:
        read_video_settings(tmp_path, [QWEN3])
    assert str(tmp_path / file) in str(raised.value)


def test_a_section_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "processor_config.json", {"video_processor": [3]})
    with pytest.raises(EngineStartError, match="must be an object"):
        read_video_settings(tmp_path, [QWEN3])
