"""Reads files from where users say that they are: data URLs, file URLs, paths.

URLs come with requests, perhaps from strangers: they reach only files below a folder that the user
of the process allows. Nothing is fetched from a network. Paths come from the command line.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shmllm.errors import RequestError

MOST_BYTES = 2**28
"""The largest file, in bytes."""

_OPTION = "allowed_local_media_path"
_LONGEST_SHOWN = 100


def bytes_of_url(
    name: str,
    url: str,
    media_type: str,
    allowed_local_media_path: str | os.PathLike[str] | None = None,
) -> bytes:
    """Reads what a URL `data:image/...;base64,...` or `file:///...` contains.

    Args:
        name: what messages call the item.
        url: the URL.
        media_type: what a data URL has to be: "image", "audio" or "video".
        allowed_local_media_path: the folder below which files are read, behind symbolic links, too;
            without it none is.

    Raises:
        RequestError: the URL is of another kind, or the file is not allowed or no regular file.
    """
    scheme = url[:_LONGEST_SHOWN].partition(":")[0].lower()
    if scheme == "data":
        return _data(name, url, media_type)
    if scheme == "file":
        return _local_file(name, url, allowed_local_media_path)
    if scheme in ("http", "https"):
        raise RequestError(
            f"{name}: {_shown(url)} is refused, as nothing is fetched from a network; download it, "
            f"and pass its bytes as a 'data:{media_type}/...;base64,' URL, or the {media_type} "
            "itself"
        )
    raise RequestError(
        f"{name}: {_shown(url)} must be a URL that begins with 'data:{media_type}/' or 'file:///'"
    )


def name_of_url(name: str, url: str) -> str:
    """What messages call the item of a URL: its file, too, if it has one."""
    return f"{name}: {_shown(url)}" if url[:5].lower() == "file:" else name


def bytes_of_path(name: str, path: str | os.PathLike[str]) -> bytes:
    """Reads a regular file that the user of the process names.

    Raises:
        RequestError: there is no such file.
    """
    return _read(name, path, repr(str(path)))


def bytes_of_base64(name: str, text: str) -> bytes:
    """Decodes base64.

    Raises:
        RequestError: it is none, or too long.
    """
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise RequestError(f"{name} has more than {MOST_BYTES:,} bytes; make it smaller")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name} is not valid base64: {error}") from None


def _data(name: str, url: str, media: str) -> bytes:
    """The bytes in a data URL (RFC 2397)."""
    header, comma, content = url.partition(",")
    media_type, *parameters = header[len("data:") :].lower().split(";")
    if not comma or not media_type.startswith(f"{media}/") or parameters[-1:] != ["base64"]:
        raise RequestError(
            f"{name}: a data URL must begin with 'data:{media}/...;base64,', not {_shown(url)}"
        )
    return bytes_of_base64(f"{name}: the data URL", content)


def _local_file(name: str, url: str, allowed: str | os.PathLike[str] | None) -> bytes:
    if allowed is None:
        raise RequestError(
            f"{name}: {_shown(url)} is not read; name a folder of files by the option {_OPTION!r}"
        )
    try:
        parts = urlsplit(url)
        path = Path(os.path.realpath(unquote(parts.path)))
        folder = Path(os.path.realpath(allowed))
    except (OSError, ValueError) as error:
        raise RequestError(f"{name}: {_shown(url)} is no valid URL of a file: {error}") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise RequestError(f"{name}: {_shown(url)} must begin with 'file:///'")
    if parts.query or parts.fragment:
        raise RequestError(f"{name}: write '?' and '#' in {_shown(url)} as '%3F' and '%23'")
    if not folder.is_dir():
        raise RequestError(f"{name}: the folder of {_OPTION!r} does not exist: {allowed}")
    if not path.is_relative_to(folder):
        raise RequestError(
            f"{name}: {_shown(url)} is not below the folder of {_OPTION!r}, {allowed}"
        )
    return _read(name, path, _shown(url), folder)


def _read(name: str, path: str | os.PathLike[str], shown: str, folder: Path | None = None) -> bytes:
    """The bytes of a regular file.

    Opening a FIFO would wait for its writer, and opening a device may do something, so the file's
    kind is looked at before it is opened, and again afterwards: it may have been replaced.
    """
    try:
        path = os.path.realpath(path)
        _check_kind(name, shown, os.lstat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check_kind(name, shown, os.fstat(descriptor))
            opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if folder is not None and not opened.is_relative_to(folder):
                raise RequestError(f"{name}: {shown} is not below the folder of {_OPTION!r}")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{name}: cannot read {shown}: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name}: {shown} is no valid path: {error}") from None
    if len(data) > MOST_BYTES:
        raise RequestError(f"{name} has more than {MOST_BYTES:,} bytes; make it smaller")
    return data


def _check_kind(name: str, shown: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{name}: {shown} is no regular file")
    if status.st_size > MOST_BYTES:
        raise RequestError(
            f"{name} has {status.st_size:,} bytes, more than {MOST_BYTES:,}; make it smaller"
        )


def _shown(url: str) -> str:
    return repr(url if len(url) <= _LONGEST_SHOWN else url[:_LONGEST_SHOWN] + "...")
