"""The engine's part of KV connectors: which models have one, and which weights they belong to."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support import connectors
from support.fakes import FakeRunner, info

from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.config.plugins import PluginConfig
from shmllm.core.kv_groups import FullAttention, KVGroup, RecurrentState, SlidingWindow
from shmllm.engine import kv_connector
from shmllm.engine.blocks_elsewhere import WeightsSource
from shmllm.engine.core import EngineCore
from shmllm.errors import EngineStartError, ShmLLMError
from shmllm.plugins.kv_connector import ConnectorContext


class Fragile(connectors.InMemory):
    """Its constructor raises if it is told to."""

    made: ClassVar[list[Fragile]] = []

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        if context.extra_config:
            raise ValueError("no room")
        self.made.append(self)

    def shutdown(self) -> None:
        raise ValueError("cannot end")


class Runner(FakeRunner):
    """Takes a connector."""

    def use_connector(self, connector: Any, name: str) -> None:
        assert name == NAME


NAME = f"{Fragile.__module__}:Fragile"


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The digest of each directory's weights; others have none."""
    found = {"m": "first"}

    def describe(config: Any, runner: Any, source: WeightsSource, stopped: Any) -> dict[str, Any]:
        if source.directory not in found:
            raise ShmLLMError(f"no digest of {source.directory}")
        return {"weights": found[source.directory]}

    monkeypatch.setattr(kv_connector, "describe", describe)
    monkeypatch.setattr(connectors, "fails_in", "")
    return found


def make(
    problems: list[str] | None = None, groups: Any = None, directory: str = "m", **options: Any
) -> EngineCore:
    config = EngineConfig(LoadConfig(directory), plugins=PluginConfig(kv_connector=NAME, **options))
    runner = Runner(info(), groups=groups) if groups else Runner(info())
    report = (problems if problems is not None else []).append
    return EngineCore(config, runner, report=report)


@pytest.mark.parametrize(
    "rules",
    [[FullAttention(), SlidingWindow(8)], [SlidingWindow(8)], [FullAttention(), RecurrentState(8)]],
    ids=["both", "window", "state"],
)
def test_layers_that_do_not_keep_everything_are_refused(rules: Any, digests: Any) -> None:
    groups = tuple(KVGroup(rule, (layer,)) for layer, rule in enumerate(rules))
    with pytest.raises(EngineStartError, match="needs a model whose layers all keep everything"):
        make(groups=groups)


def test_a_connector_that_cannot_be_made_ends_the_start(digests: Any) -> None:
    with pytest.raises(EngineStartError, match="Fragile cannot be made: ValueError: no room"):
        make(kv_connector_extra_config={"a": 1})


def test_messages_name_a_class_of_the_program_itself(
    digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmllm.plugins.qualified_names import name_of

    class Own(Fragile):
        pass

    monkeypatch.setitem(globals(), "NAME", name_of(Own, own_process=True))
    with pytest.raises(EngineStartError, match=r"__main__:.*Own cannot be made") as error:
        make(kv_connector_extra_config={"a": 1})
    assert "pickle:" not in str(error.value)


def test_weights_without_a_digest_end_the_start(digests: Any) -> None:
    with pytest.raises(EngineStartError, match="kv_connector is not possible: no digest of other"):
        make(directory="other")


def test_other_weights_have_another_identity_or_none(digests: dict[str, str]) -> None:
    problems: list[str] = []
    core = make(problems)
    assert isinstance(core.elsewhere, kv_connector.ConnectedEngine)
    seat, made = core.elsewhere.scheduler, Fragile.made[-1]
    identities = {made.identity}
    digests |= {"n": "second", "copy of m": "first"}
    for directory, is_on in ((None, False), ("n", True), ("unknown", False), ("copy of m", True)):
        source = None if directory is None else WeightsSource(directory, 0.0)
        core.weights_written(source=source)
        assert seat.is_on == is_on
        identities.add(made.identity)
    assert len(identities) == 2
    assert made.identity == made.context.identity
    assert ["has a rest" in each for each in problems] == [True, True]
    source = WeightsSource("n", 0.0)
    core.weights_written(False, source)  # blocks of other weights are there
    assert not seat.is_on


def test_a_reset_reaches_the_connector(digests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, problems = [], list[str]()
    core = make(problems)
    monkeypatch.setattr(Fragile, "reset_cache", lambda self: calls.append("reset"))
    assert core.reset_prefix_cache()
    assert not calls
    assert core.reset_prefix_cache(clear_elsewhere=True)
    assert calls == ["reset"]
    monkeypatch.setattr(Fragile, "reset_cache", lambda self: 1 / 0)
    assert core.reset_prefix_cache(clear_elsewhere=True)
    assert problems == [
        f"the KV connector {NAME} failed in reset_cache: ZeroDivisionError: division by zero"
    ]


def test_a_failed_end_is_reported(digests: Any) -> None:
    problems: list[str] = []
    make(problems).close()
    assert problems == [f"the KV connector {NAME} failed in shutdown: ValueError: cannot end"]
