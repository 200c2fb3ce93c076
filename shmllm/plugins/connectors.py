"""Finds the class of a KV connector by the name that the option `kv_connector` has."""

from __future__ import annotations

from typing import Any

from shmllm.errors import EngineStartError
from shmllm.plugins.entry_points import CONNECTORS, Plugin, find_plugins, vllm_names
from shmllm.plugins.kv_connector import KVConnector
from shmllm.plugins.qualified_names import in_one_line, load_object, shown


def load_connector_class(name: str) -> type[KVConnector]:
    """Import the class of a connector.

    Args:
        name: "module:Class", or the name of an installed plugin.

    Raises:
        EngineStartError: there is no such class.
    """
    with vllm_names():
        found: Any = load_object(name) if ":" in name else _load_plugin(name)
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise EngineStartError(
            f"kv_connector {shown(name)} is no subclass of {KVConnector.__module__}:KVConnector"
        )
    return found


def _load_plugin(name: str) -> Any:
    plugins: dict[str, Plugin] = {}
    for each in find_plugins(CONNECTORS):
        if each.filtered_by is None:
            plugins.setdefault(each.name, each)
    if name not in plugins:
        known = ", ".join(plugins) or "none"
        raise EngineStartError(
            f"kv_connector {name!r} is not known: installed plugins of the group "
            f"shmllm.{CONNECTORS}: {known}; or pass 'module:Class' (in vLLM's kv_transfer_config, "
            "kv_connector_module_path)"
        )
    try:
        return plugins[name].load()
    except (Exception, SystemExit) as problem:
        raise EngineStartError(
            f"kv_connector {name} cannot be imported: {in_one_line(problem)}"
        ) from problem
