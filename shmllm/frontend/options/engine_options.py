"""Turns the options that users give into the configurations of a front end and of an engine."""

from __future__ import annotations

import inspect
import logging
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmllm.config.engine import OPTIONS, SECTIONS, EngineConfig
from shmllm.config.front_end import FrontEndConfig
from shmllm.config.load import with_only_text
from shmllm.config.options import JsonObject, Option, Section
from shmllm.config.parallel import ParallelConfig
from shmllm.errors import EngineStartError
from shmllm.formats.draft_heads import Verifier, verifier_of
from shmllm.frontend.model_catalog import check_model
from shmllm.frontend.model_files import (
    Hub,
    generation_defaults,
    model_title,
    overridden_defaults,
    resolve_model,
)
from shmllm.frontend.options.class_names import name_class, name_processors
from shmllm.frontend.options.config_function import changed_fields
from shmllm.frontend.options.foreign_options import FOREIGN_NAMES, check_foreign_options
from shmllm.frontend.options.speculative import read_speculative_config
from shmllm.frontend.options.stored_method import check_stored_method
from shmllm.params.unknown_options import reject_unknown_options
from shmllm.plugins.entry_points import added_paths, are_installed, load_general_plugins

logger = logging.getLogger(__name__)

LLM_OPTIONS = tuple(each for each in OPTIONS if each.in_llm)
ATTACH_OPTIONS = (
    *("generation_config", "override_generation_config", "stream_interval", "default_mm_loras"),
    *("chat_template", "reasoning_parser", "reasoning_config", "tool_parser"),
    *("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path"),
    *("enable_mm_embeds", "media_io_kwargs", "structured_outputs_config"),
    *("pooler_config", "profiler_config", "stat_loggers", "stat_interval", "io_processor_plugin"),
)
"""The options of a front end that uses an engine which runs already."""
_PLACEHOLDER = re.compile(r"^( *)options: see below\.$", re.MULTILINE)  # 3.13 indents less
_MODE = "cudagraph_mode"
_COMPILATION_KEYS = (_MODE, "cudagraph_capture_sizes", "max_cudagraph_capture_size")


def read_llm_options(
    callee: str, model: str, options: Mapping[str, Any]
) -> tuple[FrontEndConfig, EngineConfig]:
    """The configurations that the keyword arguments of `LLM` describe.

    Args:
        callee: the name of the class that the user called, for messages.
        model: the model.
        options: the other keyword arguments: options of the table, and options of vLLM that have
            no effect here. None stands for the default of each, as in vLLM.

    Raises:
        TypeError: an unknown option; names the nearest known one.
        EngineStartError: a value is not valid, or the model does not exist.
    """
    own = check_foreign_options(callee, options)
    reject_unknown_options(callee, own, [*FOREIGN_NAMES, *(each.name for each in LLM_OPTIONS)])
    given = {name: value for name, value in own.items() if value is not None}
    return _make_configs({"model": model, **given})


def read_attach_options(callee: str, options: Mapping[str, Any]) -> FrontEndConfig:
    """The configuration that the keyword arguments of `LLM.attach` describe.

    Args:
        callee: the name of the method that the user called, for messages.
        options: the arguments. None stands for the default of each.

    Raises:
        TypeError: an unknown option, or one for starting an engine; names the nearest known one.
        EngineStartError: a value is not valid.
    """
    of_engines = {each.name for each in LLM_OPTIONS} - set(ATTACH_OPTIONS)
    if name := next((each for each in options if each in of_engines), None):
        raise TypeError(
            f"{callee}() got {name!r}, an option for starting an engine: it runs already"
        )
    reject_unknown_options(callee, options, ATTACH_OPTIONS)
    given = {name: value for name, value in options.items() if value is not None}
    return FrontEndConfig(**_fields_of(FrontEndConfig, given))


def make_engine_config(model: str = "tiny", **options: Any) -> EngineConfig:
    """The configuration of one engine, from any options of the table.

    Raises:
        TypeError: an unknown option; names the nearest known one.
        EngineStartError: a value is not valid, or the model does not exist.
    """
    reject_unknown_options("make_engine_config", options, [each.name for each in OPTIONS])
    front_end, config = _make_configs({"model": model, **options})
    if front_end.data_parallel_size > 1:
        raise EngineStartError(
            f"data_parallel_size {front_end.data_parallel_size} (--engines) is for engines that a "
            "front end starts: start each named engine by itself, and attach to all of them"
        )
    return config


def _make_configs(options: dict[str, Any]) -> tuple[FrontEndConfig, EngineConfig]:
    values = options
    front_end = FrontEndConfig(**_fields_of(FrontEndConfig, values))
    parallel = ParallelConfig(**_fields_of(ParallelConfig, values))
    others_import = front_end.multiprocess or parallel.num_processes > 1
    named = name_processors(values.get("logits_processors"), others_import)
    values = values | {"logits_processors": named}
    given = {each: values.get(each, "") for each in ("worker_extension_cls", "kv_connector")}
    classes = {name: name_class(each, others_import) for name, each in given.items()}
    values = values | classes
    sections = {name: _fields_of(section, values) for name, section in SECTIONS.items()}
    sections["graphs"] = _add_compilation(front_end.compilation_config, sections["graphs"])
    overrides = values.get("hf_overrides")
    if not callable(overrides):
        overrides = JsonObject().parse("hf_overrides", overrides)
    problems = load_general_plugins()
    try:
        directory = resolve_model(str(front_end.model), hub_of(front_end))
        verifier = None if front_end.speculative_config else verifier_of(directory)
        if verifier is not None:
            return _make_configs(options | _drafting(verifier, directory))
        if callable(overrides):
            overrides = JsonObject().parse("hf_overrides", changed_fields(overrides, directory))
            sections["load"]["hf_overrides"] = overrides
        check_model(
            directory,
            needs_weights=values.get("load_format") != "dummy",
            ours=values.get("model_impl") != "transformers",
            overrides=with_only_text(overrides or {}, values.get("language_model_only")),
        )
    except EngineStartError:
        for problem in problems:  # a plugin might have had the architecture
            logger.warning("%s", problem)
        raise
    if named or any(classes.values()) or are_installed():
        sections["plugins"]["search_path"] = added_paths()
    sections["load"]["directory"] = str(directory.absolute())
    sections["load"]["model_name"] = model_title(str(front_end.model))
    if front_end.tokenizer is not None or front_end.tokenizer_revision is not None:
        name = str(front_end.tokenizer or front_end.model)
        found = resolve_model(name, hub_of(front_end, of_tokenizer=True))
        sections["load"]["tokenizer_directory"] = str(found.absolute())
    drafter_hub = replace(hub_of(front_end), revision=None)
    speculative = read_speculative_config(front_end.speculative_config, drafter_hub)
    sections["load"]["further_layers"] = int(speculative.method == "mtp")
    made: dict[str, Any] = {name: SECTIONS[name](**given) for name, given in sections.items()}
    check_stored_method(str(front_end.model), directory, made["load"].quantization)
    return front_end, EngineConfig(
        **made, speculative=speculative, **_fields_of(EngineConfig, values)
    )


def hub_of(front_end: FrontEndConfig, of_tokenizer: bool = False) -> Hub:
    """How the options say that a model, or its tokenizer, is fetched."""
    revision = front_end.revision
    if of_tokenizer and front_end.tokenizer_revision is not None:
        revision = front_end.tokenizer_revision
    return Hub(revision, front_end.hf_token, front_end.download_dir)


def _drafting(verifier: Verifier, head: Path) -> dict[str, Any]:
    """The options of an engine for a model and the head that was trained for it, whose name vLLM
    takes for both."""
    logger.info("%s drafts for %s", head, verifier.name)
    drafting = {"model": str(head), "num_speculative_tokens": verifier.num_tokens}
    return {"model": verifier.name, "revision": None, "speculative_config": drafting}


def _fields_of(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values that belong to a section, by the names of its fields."""
    return {
        each.field: values[each.name]
        for each in OPTIONS
        if each.reader == section.__name__ and each.name in values
    }


def _add_compilation(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a GraphConfig, with those that vLLM's `compilation_config` sets.

    Raises:
        EngineStartError: a value is given in both places.
    """
    found = _read_compilation_config(config)
    graphs = dict(given)
    for each in OPTIONS:
        if each.name in found:
            if graphs.get(each.field) is not None:
                raise EngineStartError(
                    f"{each.name} is given twice, here and in compilation_config"
                )
            graphs[each.field] = found[each.name]
    if _MODE in found:
        mode = found[_MODE]
        graphs["mode"] = str(getattr(mode, "name", mode)).upper()
    return graphs


def _read_compilation_config(config: Any) -> dict[str, Any]:
    """The values of `_COMPILATION_KEYS` in a mapping or an object; compilers have no effect."""
    if isinstance(config, Mapping):
        unknown = [name for name in config if name not in _COMPILATION_KEYS]
        for name in unknown:
            logger.warning("compilation_config: %s has no effect: nothing is compiled", name)
        found = {name: value for name, value in config.items() if name not in unknown}
    elif isinstance(config, int) and not isinstance(config, bool):
        logger.warning("compilation_config=%d has no effect: nothing is compiled", config)
        found = {}
    elif config is None or any(hasattr(config, name) for name in _COMPILATION_KEYS):
        found = {name: getattr(config, name, None) for name in _COMPILATION_KEYS}
    else:
        raise EngineStartError(
            f"compilation_config must be a mapping with {', '.join(_COMPILATION_KEYS[:2])} or "
            f"{_COMPILATION_KEYS[2]}, got {config!r}"
        )
    return {name: value for name, value in found.items() if value is not None}


def read_model_defaults(
    directory: Path, generation_config: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The sampling defaults that come with the model, as options of SamplingParams.

    Args:
        directory: the model's directory.
        generation_config: the option of that name.
        overrides: fields of generation_config.json that take the place of the model's.

    Raises:
        EngineStartError: see `generation_defaults`.
    """
    if generation_config not in ("auto", "shmllm", "vllm"):
        raise TypeError(f"generation_config is 'auto' or 'shmllm', got {generation_config!r}")
    own = generation_defaults(directory) if generation_config == "auto" else {}
    return own | overridden_defaults(overrides or {})


def takes_llm_options(cls: type) -> type:
    """Give a class whose constructor takes `model` and `**options` the signature of all options,
    and list them in its docstring, so that `help` and completion show them."""
    named = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(_parameter(each, named) for each in LLM_OPTIONS),
        inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation="Any"),
    ]
    parameters[1] = parameters[1].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor: Any = cls.__init__  # type: ignore[misc]
    constructor.__signature__ = inspect.Signature(parameters, return_annotation=None)
    cls.__doc__ = _PLACEHOLDER.sub(
        lambda found: "\n".join(_describe(LLM_OPTIONS, found[1])), cls.__doc__ or ""
    )
    return cls


def _parameter(each: Option, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(each.name, kind, default=each.default, annotation=each.annotation)


def _describe(options: Iterable[Option], indent: str) -> Iterable[str]:
    for each in options:
        default = each.default_text or repr(each.default)
        text = f"{each.name}: {each.help} Default: {default}."
        yield textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=f"{indent}    ")
