#!/usr/bin/env python3
"""Measures what speculative decoding gains and costs: engines with and without it, in turns.

    python tools/bench_drafts.py --model MODEL [--draft MODEL] [--requests 1] [--drafted 4]
    python tools/bench_drafts.py --model MODEL --text FILE [--text FILE] [--draft ngram]

The first form fixes how many drafted tokens are accepted. Drafts are tokens that the requests are
known to get, of which each is replaced by a wrong one with the probability 1 - SHARE, for each
SHARE of `--accepted`. With `--draft MODEL` that model computes its drafts before they are replaced.
The second form completes texts, greedily, and drafts as `--draft` says.

Each round runs the engine without drafts and then every case, so that noise of the machine affects
all alike; a case's tokens a second are divided by those without drafts in that round. Only tokens
behind the prompt are timed.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from shmllm.cli.bench_output import describe_machine
from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.drafts import Acceptance
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.engine.core import EngineCore
from shmllm.frontend.model_files import resolve_model
from shmllm.frontend.options.speculative import read_speculative_config
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.arrays import IntArray
from shmllm.worker.cpu.runner import CpuRunner

Prompt = tuple[int, ...]
Known = dict[Prompt, list[int]]


def make_core(load: LoadConfig, requests: int, drafts: SpeculativeConfig) -> EngineCore:
    """An engine core in this process."""
    config = EngineConfig(
        load,
        CacheConfig(memory_bytes=2**30, enable_prefix_caching=False),
        SchedulerConfig(max(requests, 1)),
        speculative=drafts,
    )
    return EngineCore(config, CpuRunner(config))


class GivenDrafts:
    """Drafts what is known to come, with mistakes.

    Args:
        known: the output of each prompt.
        accepted: the probability that a drafted token is the right one.
    """

    catches_up = False

    def __init__(self, known: Known, accepted: float) -> None:
        self._known = known
        self._accepted = accepted
        self._draw = random.Random(0)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        begin = request.num_output_tokens
        return [
            token if self._draw.random() < self._accepted else token ^ 1
            for token in self._known[prompt][begin : begin + most]
        ]

    def behind(
        self, draft: Callable[[StepPlan], None], token_ids: IntArray
    ) -> Callable[[StepPlan], None]:
        """A method that lets a model draft, and then replaces its drafts.

        Args:
            draft: the model's method.
            token_ids: (rows, tokens), the tokens of each row.
        """

        def replaced(plan: StepPlan) -> None:
            draft(plan)
            for column, tokens in plan.drafts.items():
                found = self.draft(plan.requests[column], len(tokens))
                end = plan.starts[column] + plan.counts[column]
                token_ids[plan.rows[column], end - len(tokens) : end] = found
                plan.drafts[column] = found

        return replaced


@contextmanager
def given(core: EngineCore, drafts: GivenDrafts) -> Iterator[None]:
    """Let a core use given drafts inside the `with` block."""
    drafting: Any = core.drafting
    runner: Any = core.runner
    drafting.acceptance = Acceptance()  # other requests, as it were
    model: Any = getattr(runner, "_drafter", None)
    if model is None:
        before, drafting._drafter = drafting._drafter, drafts
        yield
        drafting._drafter = before
    else:
        model.draft = drafts.behind(type(model).draft.__get__(model), runner._batch.token_ids)
        yield
        del model.draft


def run(core: EngineCore, prompts: Sequence[Prompt], steps: int) -> tuple[float, Known]:
    """Decode prompts; returns the seconds behind the prompts, and the outputs."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        refusal = core.add(0, EngineCoreRequest(number, list(prompt), params))
        assert refusal is None, refusal
    requests = core.scheduler.requests()
    while any(each.num_computed_tokens < each.num_prompt_tokens for each in requests):
        core.step()
    began = time.perf_counter()
    while core.has_unfinished:
        core.step()
    seconds = time.perf_counter() - began
    outputs = [list(each.token_ids[each.num_prompt_tokens :]) for each in requests]
    return seconds, dict(zip(prompts, outputs, strict=True))


def acceptance_of(core: EngineCore, run_case: Callable[[], float]) -> tuple[float, dict[str, Any]]:
    """Run a case; returns its seconds, and the steps and acceptance in it."""
    stats = core.scheduler.stats
    before = stats.steps, stats.draft_tokens, stats.accepted_tokens
    seconds = run_case()
    steps, drafted, accepted = (
        new - old
        for new, old in zip(
            (stats.steps, stats.draft_tokens, stats.accepted_tokens), before, strict=True
        )
    )
    return seconds, {"steps": steps, "drafted": drafted, "accepted": accepted}


def read_texts(model: str, files: Sequence[Path]) -> list[Prompt]:
    """The texts as token ids."""
    from shmllm import LLM

    with LLM(model, load_format="dummy", multiprocess=False) as llm:
        tokenizer = llm.get_tokenizer()
    return [tuple(tokenizer.encode(file.read_text())) for file in files]


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--model", required=True, help="Model directory, GGUF file or bundled name.")
@click.option("--dtype", default="bfloat16", help="Dtype of the model.")
@click.option("--dummy", is_flag=True, help="Random weights: only config.json is read.")
@click.option("--draft", default="ngram", help="A method, or a model that drafts.")
@click.option("--drafted", default=4, help="Most tokens drafted at a time.")
@click.option("--accepted", default="0,0.7,1", help="Shares of drafted tokens that are right.")
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--requests", default=1, help="Requests that run at once.")
@click.option("--context", default=64, help="Tokens of each random prompt.")
@click.option("--steps", default=128, help="Tokens that each request decodes.")
@click.option("--rounds", default=5, help="Rounds, of which the median counts.")
@click.option("--fixed", is_flag=True, help="Always draft as much as possible.")
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
def main(
    model: str, dtype: Any, dummy: bool, draft: str, drafted: int, accepted: str,
    texts: tuple[Path, ...], requests: int, context: int, steps: int, rounds: int, fixed: bool,
    json_file: Any,
) -> None:  # fmt: skip
    is_method = draft in ("ngram", "suffix", "mtp")
    asked: dict[str, Any] = {"method": draft} if is_method else {"model": draft}
    asked |= {"num_speculative_tokens": drafted, "adaptive": not fixed}
    load = LoadConfig(
        str(resolve_model(model)),
        dtype=dtype,
        load_format="dummy" if dummy else "auto",
        further_layers=int(draft == "mtp"),
    )
    base = make_core(load, requests, SpeculativeConfig())
    core = make_core(load, requests, read_speculative_config(asked))
    shares: list[float | None] = [None]
    if texts:
        prompts = read_texts(model, texts) * requests
    else:
        draw = random.Random(0)
        vocabulary = range(core.info.vocab_size)
        prompts = [tuple(draw.choices(vocabulary, k=context)) for _ in range(requests)]
        shares = [float(share) for share in accepted.split(",")]
    ratios: dict[str, list[float]] = {str(share): [] for share in shares}
    facts: dict[str, Any] = {}
    rates = []
    for _ in range(rounds + 1):
        seconds, known = run(base, prompts, steps)
        rates.append(len(prompts) * (steps - 1) / seconds)
        for share in shares:

            def run_case(share: float | None = share, known: Known = known) -> float:
                if share is None:
                    own, found = run(core, prompts, steps)
                else:
                    with given(core, GivenDrafts(known, share)):
                        own, found = run(core, prompts, steps)
                assert found == known, "the outputs differ"
                return own

            own, facts[str(share)] = acceptance_of(core, run_case)
            ratios[str(share)].append(seconds / own)
    record = {
        "machine": describe_machine(),
        "draft": asked,
        "requests": len(prompts),
        "tokens_per_s_without": statistics.median(rates[1:]),
        "ratios": {share: statistics.median(found[1:]) for share, found in ratios.items()},
        "ranges": {share: [min(found[1:]), max(found[1:])] for share, found in ratios.items()},
        "last_round": facts,
    }
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
