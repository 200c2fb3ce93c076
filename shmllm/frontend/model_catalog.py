"""Says what is in a model directory or file: format, architecture, and whether it runs here.

`shmllm models` and the errors of a start come from this module, so they agree. It reads headers and
small JSON files, never weights. It must not know how a name leads to a directory.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shmllm.config.host import available_memory_bytes
from shmllm.errors import EngineStartError
from shmllm.formats.draft_heads import verifier_of
from shmllm.formats.gguf_directory import IDENTITY
from shmllm.formats.safetensors_header import read_header
from shmllm.formats.text_files import one_line, read_json_object
from shmllm.frontend.model_files import gguf_files, gguf_names
from shmllm.plugins.entry_points import load_general_plugins

if TYPE_CHECKING:
    from shmllm.models.draft_specs import DraftSpec

CONFIG, ADAPTER = "config.json", "adapter_config.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_PICKLES = ("*.bin", "*.pt", "*.pth")
FLOATS = ("F32", "F16", "BF16")
"""What GGUF files call the types of numbers that are not quantised."""
FLOAT32_BYTES = 4
_DRAFTS = "a head, which drafts for another model"
_AS_DRAFTER = "give that model, and this one as --draft or as speculative_config={'model': ...}"


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a model directory or file.

    Attributes:
        path: the directory or file.
        format: "safetensors", "GGUF", "pickle" or "adapter"; "" if there is no model.
        architecture: the name in config.json or in the GGUF file; "" if there is none.
        problem: why no engine can compute the model; "" if one can.
        remedy: what the user can do about the problem.
        quantization: how the weights are stored: in a GGUF file such as "Q4_1", in others such as
            "gptq"; "" for floating numbers.
        head: what it reads of another model, if it is a head that drafts for that, which no engine
            can load as its model; None: it is none.
    """

    path: Path
    format: str
    architecture: str = ""
    problem: str = ""
    remedy: str = ""
    quantization: str = ""
    head: DraftSpec | None = None

    @property
    def error(self) -> EngineStartError:
        """The error of an engine that should load this; the caller raises it."""
        return EngineStartError(
            "; ".join(filter(None, (f"{self.path}: {self.problem}", self.remedy)))
        )


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model as `shmllm models` shows it; None where a value is not known.

    Attributes:
        name: the name for `-m`.
        source: "bundled", "package", "hub" or "local".
        quantization: how the weights are stored, such as "Q4_1" or "Q4_K_M" (GGUF) or "gptq".
        parameters: the number of elements of all tensors in its files.
        size_bytes: the space that its files take on disk.
        problem: why it does not run here; None if it does.
        remedy: what the user can do about the problem.
    """

    name: str
    source: str
    path: str | None = None
    format: str | None = None
    architecture: str | None = None
    quantization: str | None = None
    parameters: int | None = None
    size_bytes: int | None = None
    problem: str | None = None
    remedy: str | None = None


class Drafter(NamedTuple):
    """How a directory drafts.

    directory: as given.
    method: by which method.
    is_parallel: whether a head drafts all tokens at once.
    usual_drafted: the number of tokens that it was trained to draft; None: it does not say.
    """

    directory: Path
    method: str
    is_parallel: bool = False
    usual_drafted: int | None = None


def contents_of(
    path: Path, *, ours: bool = True, overrides: Mapping[str, Any] | None = None
) -> Contents:
    """What is in a directory, or in a GGUF file. Damaged files are described as a problem.

    Args:
        path: the directory or file.
        ours: whether one of our implementations is to run it; otherwise one of transformers, which
            only an engine can judge.
        overrides: fields that take the place of those in config.json.
    """
    if path.is_file():
        return _gguf_contents(path)
    if (path / ADAPTER).is_file() and not has_own_weights(path):
        return _adapter_contents(path)
    files = gguf_files(path)
    if len(files) == 1:
        return _gguf_contents(files[0])
    if files:
        return Contents(path, "GGUF", "", gguf_names(files), "give the path of one of them")
    if not (path / CONFIG).is_file():
        looked = f"looked for {path / CONFIG}, *.safetensors and *.gguf"
        return Contents(path, "", "", f"no model: {looked}", "give the directory that has them")
    return _transformers_contents(path, ours, overrides)


def has_own_weights(directory: Path) -> bool:
    """Whether a directory with an adapter has the weights of a whole model, too."""
    weights = (*directory.glob("model*.safetensors"), *directory.glob("pytorch_model*.bin"))
    return (directory / CONFIG).is_file() and bool(weights)


def check_model(
    directory: Path,
    *,
    needs_weights: bool,
    ours: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Raise EngineStartError, which says what is there and what can be done, if no engine can load
    a directory. Other problems, such as damaged weights, are found by the engine.

    Args:
        directory: the model's directory.
        needs_weights: False if the engine makes random weights.
        ours, overrides: see `contents_of`.
    """
    if (directory / IDENTITY).is_file():
        if not ours:
            raise EngineStartError("model_impl='transformers' reads no GGUF files")
        return  # it was made from a GGUF file, after these checks
    found = contents_of(directory, ours=ours, overrides=overrides)
    is_unread = found.format == "pickle" and found.head is None
    if found.problem and (needs_weights or not is_unread):
        raise found.error


def check_drafter(directory: Path) -> Drafter:
    """Return how a directory drafts.

    Raises:
        EngineStartError: as `check_model`.
    """
    if (directory / IDENTITY).is_file():
        return Drafter(directory, "draft_model")
    found = contents_of(directory)
    if found.problem and found.head is None:
        raise found.error
    if found.head is None:
        return Drafter(directory, "draft_model")
    is_parallel, usual = found.head.mask_token is not None, found.head.usual_drafted
    return Drafter(directory, found.head.method, is_parallel, usual)


def record_of_model(
    name: str, source: str, path: Path, size_bytes: int | None = None
) -> ModelRecord:
    """Describe a model on this machine. One whose files cause any exception has that as its
    problem, so that a list of models always has all of them.

    Args:
        name: its name for the user.
        source: as in ModelRecord.
        path: its directory or file.
        size_bytes: the space on disk, if it is known already.
    """
    try:
        return _record(name, source, path, size_bytes)
    except Exception as error:
        problem = f"cannot be described ({type(error).__name__}: {one_line(error)})"
        return ModelRecord(name, source, str(path), size_bytes=size_bytes, problem=problem)


def _record(name: str, source: str, path: Path, size_bytes: int | None) -> ModelRecord:
    found = contents_of(path)
    parameters = None
    try:
        parameters = num_parameters(path)
        problem, remedy = found.problem, found.remedy
        if found.head is not None and verifier_of(path) is not None:
            problem, remedy = "", ""  # its name is enough for both
        elif not problem:
            problem, remedy = _lack(found, parameters)
    except EngineStartError as error:
        problem, remedy = one_line(error), ""
    return ModelRecord(
        name,
        source,
        str(path),
        found.format or None,
        found.architecture or None,
        found.quantization or None,
        parameters,
        _size_of(path) if size_bytes is None else size_bytes,
        problem or None,
        remedy or None,
    )


def num_parameters(path: Path) -> int | None:
    """The number of elements of all tensors, from the headers of the files; None if there are none.

    Raises:
        EngineStartError: a file is damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if files:
        return sum(read_header(each).num_elements for each in files)
    files = gguf_files(path) if path.is_dir() else [path]
    if not files:
        return None
    from shmllm.formats.gguf_pieces import pieces_of, read_pieces

    header = read_pieces(pieces_of(files[0]))
    return sum(prod(each.shape) for each in header.tensors.values())


def _adapter_contents(path: Path) -> Contents:
    try:
        config = read_json_object(path / ADAPTER)
    except EngineStartError as error:
        return Contents(path, "adapter", "", one_line(error))
    kind = config.get("peft_type") or "LoRA"
    base = config.get("base_model_name_or_path") or "another model"
    return Contents(
        path,
        "adapter",
        "",
        f"a {kind} adapter for {base}, not a whole model",
        "merge both with peft: merge_and_unload(), then save_pretrained()",
    )


def _gguf_contents(path: Path) -> Contents:
    from shmllm.formats.gguf import is_gguf
    from shmllm.formats.gguf_pieces import pieces_of, read_pieces
    from shmllm.frontend.gguf.config import model_config
    from shmllm.frontend.gguf.metadata import quantization_of

    try:
        header = read_pieces(pieces_of(path))
    except EngineStartError as error:
        return Contents(path, "GGUF" if is_gguf(path) else "", "", _without(path, error))
    problem = ""
    try:
        model_config(header)
    except EngineStartError as error:
        problem = _without(path, error)
    return Contents(
        path, "GGUF", header.architecture, problem, quantization=quantization_of(header)
    )


def _transformers_contents(path: Path, ours: bool, overrides: Mapping[str, Any] | None) -> Contents:
    from shmllm.models.config import ModelConfig
    from shmllm.models.config_file import read_config, read_fields
    from shmllm.models.quantization_methods import METHODS

    config_path = path / CONFIG
    architecture = method = ""
    head = None
    try:
        config = read_config(path)
        names = config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            architecture = names[0] if names[0].isprintable() else ""
        if quantization := config.get("quantization_config"):
            method = _method_of(quantization)
            if method not in METHODS:
                return _quantized_contents(path, architecture, method)
        load_general_plugins()
        if ours:
            model = ModelConfig.from_fields(read_fields(path, overrides), path)
            head = model.drafting
    except EngineStartError as error:
        return Contents(config_path, "safetensors", architecture, _without(config_path, error))
    format, problem, remedy = _weights_of(path, reads_pickles=ours and not method)
    if head is not None and not problem:
        problem, remedy = _DRAFTS, _AS_DRAFTER
    return Contents(path, format, architecture, problem, remedy, method, head)


def _weights_of(path: Path, reads_pickles: bool) -> tuple[str, str, str]:
    """The format of a directory's weights, and, if they are not read, why, and the remedy."""
    pickle = _first(path, (*PICKLES, *OTHER_PICKLES))
    if any(path.glob("*.safetensors")) or pickle is None:
        return "safetensors", "", ""
    if reads_pickles and _first(path, PICKLES) is not None:
        return "pickle", "", ""
    problem = f"its weights are a pickle ({pickle.name}) that is not read"
    return "pickle", problem, "load it with transformers and save it again with save_pretrained()"


def _method_of(quantization: Any) -> str:
    """The method of a checkpoint's ``quantization_config``; empty if it is not known."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return method if isinstance(method, str) and method.isprintable() else ""


def _quantized_contents(path: Path, architecture: str, method: str) -> Contents:
    return Contents(
        path,
        "safetensors",
        architecture,
        f"quantized with {method or 'an unknown method'}, which is not supported",
        "take the model that it was made from: --quantization int8 or int4 rounds it at its load",
    )


def _lack(found: Contents, parameters: int | None) -> tuple[str, str]:
    """What a model that an engine can compute lacks here, and what to do: ("", "") if nothing."""
    from shmllm.formats.tokenizer_files import FAST_FILE, has_tokenizer

    if parameters is None and found.format != "pickle":
        return "no weights", "copy or download model.safetensors, too"
    if found.format in ("safetensors", "pickle") and not has_tokenizer(found.path):
        return "no tokenizer", f"copy {FAST_FILE} from the model that it was made from"
    if parameters is not None and found.quantization in ("", *FLOATS):
        needed, form = parameters * FLOAT32_BYTES, " as float32"
        remedy = (
            "--dtype bfloat16 needs half of that, --quantization int8 a quarter, int4 a seventh"
        )
    else:
        needed, form = _size_of(found.path), ""
        remedy = "take a copy of fewer bits, or one with fewer parameters"
    free = available_memory_bytes()
    if needed > free and not glob.glob("/dev/nvidia[0-9]*"):
        return f"its weights need {gibibytes(needed)}{form}, and {gibibytes(free)} are free", remedy
    return "", ""


def gibibytes(num_bytes: int) -> str:
    """A size with a suitable unit."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.0f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"


def _size_of(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    from shmllm.formats.gguf_pieces import pieces_of

    try:
        files = pieces_of(path)
    except EngineStartError:  # a piece is missing
        files = [path]
    return sum(each.stat().st_size for each in files)


def _first(directory: Path, patterns: tuple[str, ...]) -> Path | None:
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    return min(found, default=None)


def _without(path: Path, error: EngineStartError) -> str:
    """The text of an error about a path, without the path at its beginning."""
    return one_line(error).removeprefix(f"{path}:").removeprefix(str(path)).strip()
