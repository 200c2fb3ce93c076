"""`shmllm embed` with images, on the command line and in rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import commands
from support.engines import assert_unused, named_engine
from support.image_text_models import ImageTextModel, make_image_text_model, some_images
from support.pooling_models import assert_vectors_close
from support.programs import Completed

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

RAW = "--no-normalize"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageTextModel:
    return make_image_text_model("clip", tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def engine(model: ImageTextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("engine")
    with named_engine(directory, model=str(model.directory), dtype="float32") as (name, _):
        yield name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("images")
    for number, image in enumerate(some_images()):
        image.save(found / f"{number}.png")
    (found / "bad.png").write_bytes(b"no image")
    return found


def embed(engine: str, *arguments: str | Path, code: int = 0) -> Completed:
    done = commands.shmllm("embed", *map(str, arguments), "--attach", engine)
    assert done.returncode == code, done.stderr.decode()
    assert_unused(engine)
    return done


def test_each_image_of_the_command_line_has_a_record(
    model: ImageTextModel, engine: str, folder: Path
) -> None:
    paths = [str(folder / name) for name in ("0.png", "bad.png", "2.png")]
    given = [word for path in paths for word in ("--image", path)]
    done = embed(engine, RAW, *given, code=1)
    first, bad, last = map(json.loads, done.stdout.splitlines())
    assert [each["image"] for each in (first, bad, last)] == paths
    assert "bad.png has an unknown format" in bad["error"]
    wanted = [model.vector(some_images()[number]) for number in (0, 2)]
    found = [np.array(each["embedding"], np.float32) for each in (first, last)]
    assert_vectors_close(found, wanted, 2e-5)


def test_rows_name_images_or_have_texts(model: ImageTextModel, engine: str, folder: Path) -> None:
    rows = [
        {"id": "a", "images": ["1.png"], "k": 1},
        {"text": "2 3 4"},
        {"text": "2 3", "images": ["1.png"]},
        {"images": "1.png"},
        {"images": []},
    ]
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    option = "--allowed-local-media-path", folder
    embed(engine, RAW, "-i", source, "-o", target, *option, code=1)
    records = list(map(json.loads, target.read_text().splitlines()))
    assert (records[0]["id"], records[0]["k"], records[0]["num_prompt_tokens"]) == ("a", 1, 1)
    wanted = [model.vector(some_images()[1]), model.vector("2 3 4")]
    found = [np.array(each["embedding"], np.float32) for each in records[:2]]
    assert_vectors_close(found, wanted, 2e-5)
    assert "an image and a text" in records[2]["error"]
    assert "'images' must be a list of paths" in records[3]["error"]
    assert "none of 'text', 'prompt' is given" in records[4]["error"]


def test_options_that_exclude_each_other_are_refused(engine: str, folder: Path) -> None:
    image = "--image", folder / "0.png"
    for arguments, words in (
        ((*image, "-i", folder / "in.jsonl"), b"--image and --input exclude each other"),
        (("--text", "a"), b"--text is beside an --image"),
        (("--image", folder / "none.png"), b"--image: there is no file"),
    ):
        assert words in embed(engine, *arguments, code=2).stderr
