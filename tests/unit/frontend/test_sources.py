"""Items come from data URLs, from files below an allowed folder, and from nowhere else."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shmllm.errors import RequestError
from shmllm.frontend import sources
from shmllm.frontend.items.files import item_of_path, item_of_url

NAME = "prompt 0: image 2"


@pytest.fixture
def png(random_image: Callable[..., Image.Image]) -> bytes:
    file = io.BytesIO()
    random_image(6, 4).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path, png: bytes) -> Path:
    """An allowed folder with images, beside a secret one."""
    allowed = tmp_path / "allowed"
    (allowed / "inner").mkdir(parents=True)
    (allowed / "inner" / "a b#?%.png").write_bytes(png)
    (tmp_path / "allowed and more").mkdir()
    (tmp_path / "allowed and more" / "secret.png").write_bytes(png)
    (tmp_path / "secret.png").write_bytes(png)
    return allowed


def data_url(png: bytes, header: str = "data:image/png;base64") -> str:
    return f"{header},{base64.b64encode(png).decode()}"


@pytest.mark.parametrize(
    "header",
    ["data:image/png;base64", "DATA:Image/JPEG;Base64", "data:image/x;charset=utf-8;base64"],
)
def test_a_data_url_is_read(header: str, png: bytes) -> None:
    with Image.open(io.BytesIO(png)) as image:
        expected = np.asarray(image)
    assert (
        np.asarray(item_of_url("image", NAME, data_url(png, header))).tolist() == expected.tolist()
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,", r"is empty \(0 bytes\)"),
        ("data:image/png;base64,####", "is not valid base64"),
        ("data:image/png;base64,QUJ", "is not valid base64"),
        ("data:image/png;base64,ü", "is not valid base64"),
        ("data:image/png,QUJD", "must begin with 'data:image/...;base64,'"),
        ("data:text/plain;base64,QUJD", "must begin with 'data:image/"),
        ("data:image/png;base64", "must begin with 'data:image/"),
        ("http://host/a.png", "nothing is fetched from a network"),
        ("HTTPS://host/a.png", "nothing is fetched from a network"),
        ("ftp://host/a.png", "must be a URL that begins with"),
        ("a.png", "must be a URL that begins with"),
        ("", "must be a URL that begins with"),
    ],
)
def test_other_urls_are_refused_with_the_name(url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        item_of_url("image", NAME, url)
    assert str(raised.value).startswith(NAME)


def test_a_long_url_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as raised:
        item_of_url("image", NAME, "data:" + "x" * 100_000)
    assert len(str(raised.value)) < 300


def test_files_below_the_folder_are_read(folder: Path, tmp_path: Path) -> None:
    path = folder / "inner" / "a b#?%.png"
    for url in (path.as_uri(), path.as_uri().replace("file://", "file://localhost")):
        assert item_of_url("image", NAME, url, folder).size == (6, 4)
        assert item_of_url("image", NAME, url, str(folder)).size == (6, 4)
        assert item_of_url("image", NAME, url, "/").size == (6, 4)
    (tmp_path / "link to folder").symlink_to(folder)
    assert item_of_url("image", NAME, path.as_uri(), tmp_path / "link to folder").size == (6, 4)
    (folder / "good link.png").symlink_to(path)
    assert item_of_url("image", NAME, (folder / "good link.png").as_uri(), folder).size == (6, 4)


def test_without_the_option_no_file_is_read(folder: Path) -> None:
    with pytest.raises(RequestError, match="by the option 'allowed_local_media_path'"):
        item_of_url("image", NAME, (folder / "inner" / "a b#?%.png").as_uri())


@pytest.mark.parametrize(
    "target", ["../secret.png", "inner/../../secret.png", "link.png", "folder/secret.png"]
)
def test_files_elsewhere_are_refused_by_the_options_name(
    target: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "folder").symlink_to(tmp_path)
    outside = [f"file://{folder}/{target}", f"file://{folder}/{target.replace('.', '%2E')}"]
    outside.append((tmp_path / "allowed and more" / "secret.png").as_uri())
    for url in outside:
        with pytest.raises(RequestError, match="is not below the folder of 'allowed_local_media"):
            item_of_url("image", NAME, url, folder)


def test_a_file_that_is_exchanged_while_it_is_opened_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the opening, the folder of the file becomes a link to another one."""
    path = folder / "inner" / "secret.png"
    path.write_bytes((tmp_path / "secret.png").read_bytes())
    really_open = os.open

    def exchange(checked: str, flags: int) -> int:
        (folder / "inner").rename(tmp_path / "moved")
        (folder / "inner").symlink_to(tmp_path)
        return really_open(checked, flags)

    monkeypatch.setattr(sources.os, "open", exchange)
    with pytest.raises(RequestError, match="is not below the folder"):
        item_of_url("image", NAME, path.as_uri(), folder)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://{}/inner", "is no regular file"),
        ("file://{}/fifo", "is no regular file"),
        ("file:///dev/zero", "is no regular file"),
        ("file://{}/missing.png", "No such file"),
        ("file://{}/a%00b.png", "no valid"),
        ("file://{}/a.png?x=1", "write '\\?' and '#'"),
        ("file://host{}/a.png", "must begin with 'file:///'"),
        ("file:relative.png", "must begin with 'file:///'"),
        ("file://{}/empty.png", r"is empty \(0 bytes\)"),
        ("file://{}/text.png", "unknown format"),
    ],
)
def test_what_is_no_image_file_is_refused(url: str, message: str, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    allowed = "/" if "/dev" in url else folder
    with pytest.raises(RequestError, match=message) as raised:
        item_of_url("image", NAME, url.format(folder), allowed)
    assert str(raised.value).startswith(NAME)


def test_the_folder_must_exist(folder: Path) -> None:
    with pytest.raises(RequestError, match="folder of 'allowed_local_media_path' does not exist"):
        item_of_url("image", NAME, f"file://{folder}/a.png", folder / "none")


def test_a_file_above_the_limit_is_refused(
    folder: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 50)
    with pytest.raises(RequestError, match=r"bytes, more than 50; make it smaller"):
        item_of_path("image", NAME, folder / "inner" / "a b#?%.png")
    with pytest.raises(RequestError, match="has more than 50 bytes"):
        item_of_url("image", NAME, data_url(png))


def test_paths_need_no_folder(folder: Path, tmp_path: Path) -> None:
    assert item_of_path("image", NAME, tmp_path / "secret.png").size == (6, 4)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    assert item_of_path("image", NAME, str(folder / "link.png")).size == (6, 4)
    for path, message in (
        (folder, "is no regular file"),
        (folder / "none", "cannot read .*none': No such file"),
        ("a\0b", "no valid path"),
    ):
        with pytest.raises(RequestError, match=f"{NAME}: .*{message}"):
            item_of_path("image", NAME, path)
