"""Opens the `LLM` that a command uses: one with a private engine, or one of a named engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.adapters import Adapters, with_adapters
from shmllm.cli.metrics import check_metrics_port, start_metrics_server
from shmllm.cli.options import ITEM_OPTIONS, Status, flag_of, given_options
from shmllm.errors import ShmLLMError
from shmllm.params.items import COUNTED, MODALITIES

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM


@dataclass(frozen=True)
class CommandSession:
    """
    Attributes:
        attach: name of a running engine; None starts one.
        engine: options of `LLM`.
        metrics_port: where statistics are served while the command runs; None for nowhere.
        priority: the priority of the command's requests; None for an engine without priorities.
        adapters: the adapters that the command's requests may have.
        replies: the options of `LLM` and `LLM.attach` that the front end reads: the formats of
            replies, the folder of items.
    """

    attach: str | None
    engine: dict[str, Any]
    metrics_port: int | None = None
    priority: int | None = None
    adapters: Adapters = field(default_factory=dict)
    replies: dict[str, str] = field(default_factory=dict)

    def open(self) -> LLM:
        """Start an engine, or attach to the named one.

        Raises:
            click.UsageError: an option does not fit the engine.
        """
        check_metrics_port(self.metrics_port)
        if self.attach is None:
            self._check_policy(self.engine["scheduling_policy"])
            llm = _start(with_adapters(self.engine, self.adapters) | self.replies)
        else:
            llm = _attach_to(self.attach, self.engine, self.replies)
            try:
                self._check_policy(llm.facts.scheduling_policy)
            except click.UsageError:
                llm.close()
                raise
        if self.metrics_port is not None:
            self._serve_metrics(llm, self.metrics_port)
        return llm

    def _check_policy(self, policy: str) -> None:
        if self.priority and policy != "priority":
            raise click.UsageError(
                "--priority needs an engine that was started with --scheduling-policy priority"
            )

    def _serve_metrics(self, llm: LLM, port: int) -> None:
        from shmllm.monitor.find import engine_of_this_process
        from shmllm.monitor.sample import Watch

        engine = engine_of_this_process()
        assert engine is not None
        watch = Watch(engine)
        labels = {"engine": self.attach or "private"}
        stop = start_metrics_server(
            port,
            lambda: (llm.get_metrics(), watch.durations()),
            labels,
            (ShmLLMError, ValueError),
        )
        context = click.get_current_context()
        context.call_on_close(watch.close)
        context.call_on_close(stop)

    def describe_engine(self, llm: LLM) -> None:
        """Print one line about the engine and its model to stderr."""
        click.echo(_describe(llm, self.attach or self.engine["model"]), err=True)


def _start(engine: dict[str, Any]) -> LLM:
    """Start an engine, and show its progress if stderr is a terminal."""
    from shmllm.frontend.llm import LLM

    status = Status()
    status.show(f"starting {engine['model']}")
    try:
        return LLM(**engine, on_load_progress=status.loading, on_capture_progress=status.capturing)
    finally:
        status.clear()


def _attach_to(name: str, engine: dict[str, Any], replies: dict[str, Any]) -> LLM:
    """Use a named engine. Options for starting an engine are a usage error; those of items are
    the front end's."""
    from shmllm.frontend.llm import LLM

    given = given_options(engine)
    of_items = {option: engine[option] for option in given if option in ITEM_OPTIONS}
    if others := [option for option in given if option not in of_items]:
        flag = flag_of(others[0])
        raise click.UsageError(f"{flag} is for starting an engine; {name!r} runs already")
    return LLM.attach(name, **replies, **of_items)


def _describe(llm: LLM, name: str) -> str:
    """One line about the engine and its model."""
    facts = llm.facts
    graphs = f"; graphs {facts.graphs}" if facts.graphs else ""
    shared = facts.shared_kv_cache_bytes
    sharing = f"; {shared / 2**20:,.0f} MiB of KV cache shared" if shared else ""
    drafts = f"; drafts by {facts.speculation}" if facts.speculation else ""
    taken = ", ".join(COUNTED[kind] for kind in MODALITIES if kind in facts.items.modalities)
    items = f"; takes {taken}" if taken else ""
    return (
        f"{name}: {facts.num_parameters / 1e6:,.1f} M parameters, {facts.precision}, "
        f"weights {facts.weight_bytes / 2**20:,.0f} MiB, {facts.processor}, "
        f"{facts.max_model_len:,} tokens of context, KV cache "
        f"{facts.kv_cache_bytes / 2**20:,.0f} MiB (room for {facts.max_concurrency:,.1f} "
        f"requests of that length){sharing}{graphs}{drafts}{items}"
    )
