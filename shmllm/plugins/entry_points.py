"""Finds and loads the plugins of installed packages.

A package announces a plugin as an entry point of one of our groups, or of vLLM's group of the same
kind. While a plugin is loaded, `import vllm` finds our replacement, `shmllm.compat`. SHMLLM_PLUGINS
is a list of names, separated by commas, of the plugins to load; without it, all are. VLLM_PLUGINS
does the same for vLLM's groups alone. A plugin that cannot be loaded is a problem in words, never
an exception. This module must not know what a plugin does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from shmllm.errors import ShmLLMError
from shmllm.plugins.qualified_names import in_one_line

GENERAL, PROCESSORS = "general_plugins", "logits_processors"
STAT_LOGGERS, IO_PROCESSORS = "stat_logger_plugins", "io_processor_plugins"
CONNECTORS = "kv_connectors"
KINDS = (GENERAL, PROCESSORS, STAT_LOGGERS, IO_PROCESSORS, CONNECTORS)
OWNERS = {"shmllm": ("SHMLLM_PLUGINS",), "vllm": ("SHMLLM_PLUGINS", "VLLM_PLUGINS")}
"""The prefixes of groups, and the variables that filter the plugins of each."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of one of the groups.

    Attributes:
        group: such as "shmllm.general_plugins".
        name: the name that the package gives it, which the variables list.
        value: what it names, as "module:name".
        package: the name of the package.
        entry: the entry point.
    """

    group: str
    name: str
    value: str
    package: str
    entry: EntryPoint

    @property
    def filtered_by(self) -> str | None:
        """The variable that excludes the plugin; None if it is loaded."""
        for variable in OWNERS[self.group.partition(".")[0]]:
            names = os.environ.get(variable)
            if names is not None and self.name not in (each.strip() for each in names.split(",")):
                return variable
        return None

    def load(self) -> Any:
        """Import what the entry point names. Raises whatever that raises."""
        if self.group.startswith("vllm."):
            _refuse_real_vllm()
        return self.entry.load()

    def problem(self, error: BaseException) -> str:
        """Describe, in one line, why the plugin cannot be used."""
        return (
            f"the plugin {self.name} ({self.group}, {self.value}, package {self.package}) is not "
            f"used: {in_one_line(error)}"
        )


def find_plugins(kind: str) -> list[Plugin]:
    """Return the plugins of a kind that are installed: ours first, then those made for vLLM. If a
    package has a name in both groups, only ours counts."""
    found: dict[tuple[str, str], Plugin] = {}
    for owner in OWNERS:
        for plugin in _installed(tuple(sys.path)):
            if plugin.group == f"{owner}.{kind}":
                found.setdefault((plugin.package, plugin.name), plugin)
    return list(found.values())


def load_plugins(kind: str) -> tuple[dict[str, Any], list[str]]:
    """Load the plugins of a kind that no variable excludes.

    Returns:
        The loaded objects by name, and a sentence for each plugin that could not be loaded.
    """
    loaded: dict[str, Any] = {}
    problems = []
    for plugin in find_plugins(kind):
        if plugin.filtered_by is None:
            try:
                with vllm_names():
                    loaded.setdefault(plugin.name, plugin.load())
            except (Exception, SystemExit) as error:
                problems.append(plugin.problem(error))
    return loaded, problems


@lru_cache(maxsize=1)
def load_general_plugins() -> tuple[str, ...]:
    """Load the general plugins and call each, once in a process.

    Returns:
        A sentence for each plugin that could not be loaded or raised.
    """
    problems = []
    for plugin in find_plugins(GENERAL):
        if plugin.filtered_by is None:
            try:
                with vllm_names():
                    plugin.load()()
            except (Exception, SystemExit) as error:
                problems.append(plugin.problem(error))
    return tuple(problems)


def describe_plugins() -> list[dict[str, str]]:
    """Return the group, name, value and package of each installed plugin, and its state: "loaded",
    the variable that excludes it, or the error that its import raised."""
    described = []
    with vllm_names():
        for plugin in (each for kind in KINDS for each in find_plugins(kind)):
            if (variable := plugin.filtered_by) is not None:
                state = f"excluded by {variable}"
            else:
                try:
                    plugin.load()
                    state = "loaded"
                except (Exception, SystemExit) as error:
                    state = in_one_line(error)
            names = {name: getattr(plugin, name) for name in ("group", "name", "value", "package")}
            described.append({**names, "state": state})
    return described


@contextlib.contextmanager
def vllm_names() -> Iterator[None]:
    """A context in which `import vllm` finds `shmllm.compat`, unless vLLM itself is installed."""
    from shmllm.compat import vllm

    if "vllm" in sys.modules or util.find_spec("vllm") is not None:
        yield
        return
    vllm.install()
    try:
        yield
    finally:
        vllm.uninstall()


def keep_vllm_names(*, is_needed: bool) -> None:
    """Let `import vllm` find `shmllm.compat` in this process from now on, as methods of plugins may
    import it when they are called. A front end's process is the user's, so only engines do this.

    Args:
        is_needed: do so even if no plugin is in one of vLLM's groups.
    """
    for_vllm = (p for p in _installed(tuple(sys.path)) if p.group.startswith("vllm."))
    if is_needed or any(plugin.filtered_by is None for plugin in for_vllm):
        from shmllm.compat import vllm

        with contextlib.suppress(ShmLLMError):  # vLLM itself is installed
            vllm.install()


def are_installed() -> bool:
    """Whether there is any plugin, of any kind."""
    return bool(_installed(tuple(sys.path)))


def added_paths() -> tuple[str, ...]:
    """Return the directories that this process imports from and a new interpreter would not.

    An engine that searches them behind its own finds the modules and plugins that its front end
    finds, and nothing else in place of its own modules.
    """
    usual = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    found = dict.fromkeys(os.path.abspath(path) for path in sys.path)
    return tuple(p for p in found if os.path.isdir(p) and os.path.realpath(p) not in usual)


def search_also(paths: Sequence[str]) -> None:
    """Let this process import from further directories, behind all others."""
    known = {os.path.abspath(path) for path in sys.path}
    sys.path += [path for path in paths if path not in known]


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Return the plugins of all kinds, for a value of `sys.path`."""
    groups = {f"{owner}.{kind}" for owner in OWNERS for kind in KINDS}
    everything = list(distributions(path=list(path)))
    if not any(entry.group in groups for each in everything for entry in each.entry_points):
        return ()  # to know a distribution's name takes ten times as long, in each process
    found, seen = [], set()
    for distribution in everything:
        package = distribution.name
        if not package or package in seen:
            continue  # the first one on the path is what `import` finds
        seen.add(package)
        for entry in distribution.entry_points:
            if entry.group in groups:
                found.append(Plugin(entry.group, entry.name, entry.value, package, entry))
    return tuple(sorted(found, key=lambda each: (each.package, each.group, each.name)))


def _refuse_real_vllm() -> None:
    spec = util.find_spec("vllm")
    if spec is not None and spec.origin != "shmllm.compat.vllm":
        where = Path(spec.origin or "somewhere").parent
        raise ShmLLMError(f"`import vllm` finds vLLM itself in {where}, whose plugins it loads")
