"""The options for plugins: what an engine imports besides its own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from shmllm.config.options import JsonObject, OneOf, Section, option
from shmllm.errors import EngineStartError

Role = Literal["kv_both", "kv_producer", "kv_consumer"]


@dataclass(frozen=True)
class ClassNames:
    """The kind of the option `logits_processors`: names of classes, as a list or as text with
    commas, or None."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise EngineStartError(f"{name} must be a list of 'module:Class', got {value!r}")
        for each in names:
            if not isinstance(each, str) or each.count(":") != 1 or not all(each.split(":")):
                raise EngineStartError(f"{name} must be a list of 'module:Class', got {each!r}")
        return tuple(each.strip() for each in names)


@dataclass(frozen=True)
class ClassName:
    """The kind of the option `worker_extension_cls`: the name of a class, or empty."""

    def parse(self, name: str, value: Any) -> Any:
        if not isinstance(value, str) or (
            value and not value.replace(":", ".").strip(".").count(".")
        ):
            raise EngineStartError(f"{name} must be 'module.Class', got {value!r}")
        return value


@dataclass(frozen=True)
class ConnectorName:
    """The kind of the option `kv_connector`: "module:Class", the name of a plugin, or empty."""

    def parse(self, name: str, value: Any) -> Any:
        is_name = isinstance(value, str) and value.count(":") <= 1
        if not is_name or (":" in value and not all(value.split(":"))):
            raise EngineStartError(
                f"{name} must be 'module:Class' or the name of a plugin, got {value!r}"
            )
        return value


@dataclass(frozen=True, slots=True)
class PluginConfig(Section):
    """The plugins of an engine.

    Attributes:
        search_path: the directories that the engine imports from, behind its own.
    """

    logits_processors: tuple[str, ...] | None = option(
        None,
        "Classes of logits processors, as 'module:Class'; `LLM` takes the classes, too. Those of "
        "installed plugins come first.",
        ClassNames(),
        default_text="those of plugins",
    )
    worker_extension_cls: str = option(
        "",
        "A class, as 'module.Class', whose methods `collective_rpc` calls in each rank's worker, "
        "as trainers do; `LLM` takes the class, too.",
        ClassName(),
        default_text="none",
    )
    kv_connector: str = option(
        "",
        "A class that loads and saves KV blocks elsewhere, as 'module:Class' or a plugin's name; "
        "`LLM` takes the class, too.",
        ConnectorName(),
        default_text="none",
    )
    kv_connector_extra_config: dict[str, Any] | None = option(
        None,
        "What the KV connector gets, as a mapping; on the command line as JSON.",
        JsonObject(),
        default_text="nothing",
    )
    kv_role: Role = option(
        "kv_both",
        'What the KV connector does: "kv_producer" only saves blocks, "kv_consumer" only loads '
        "them.",
        OneOf(get_args(Role)),
    )
    search_path: tuple[str, ...] = ()

    @property
    def runs_code_of_others(self) -> bool:
        """Whether an option names code, which may have been written for vLLM."""
        return bool(self.logits_processors or self.worker_extension_cls or self.kv_connector)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        object.__setattr__(self, "search_path", tuple(self.search_path))  # JSON has lists
