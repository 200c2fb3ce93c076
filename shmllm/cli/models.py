"""`shmllm models`: lists the models on this machine, or describes one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shmllm.cli.listing import print_records

if TYPE_CHECKING:
    from shmllm.frontend.model_catalog import ModelRecord


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def models(name: str | None, as_json: bool) -> None:
    """List the models on this machine, what each is, and whether it runs here.

    These are the bundled models, those of installed packages, and those in the cache of the Hugging
    Face hub. With NAME (one of these, a model directory or a GGUF file), describe that one, or
    list all GGUF models of the directory. The command reads headers, no weights, and uses no
    network.

    \b
    shmllm models
    shmllm models ./my-model
    shmllm models --json | jq '.[] | select(.problem == null).name'
    """
    from shmllm.frontend.model_listing import describe_models, list_models

    found = list_models() if name is None else describe_models(name)
    if as_json:
        records = [asdict(each) | {"takes": takes(each)} for each in found]
        click.echo(json.dumps(records, indent=2))
    elif name is None or len(found) > 1:
        _print_list(found)
    else:
        _print_one(found[0])


def _print_list(found: list[ModelRecord]) -> None:
    taken = [", ".join(takes(each)) for each in found]
    rows = [
        {
            "name": each.name,
            "architecture": each.architecture,
            "format": _format(each),
            "parameters": _count(each.parameters),
            "size": _size(each.size_bytes),
            **({"takes": kinds or None} if any(taken) else {}),
            "runs here": "no" if each.problem else "yes",
        }
        for each, kinds in zip(found, taken, strict=True)
    ]
    print_records(tuple(rows[0]), rows, shrinking=("name", "architecture"))
    unfit = [each for each in found if each.problem]
    if unfit:
        click.echo()
    for each in unfit:
        click.echo(f"{each.name}: {_reason(each)}")


def _print_one(found: ModelRecord) -> None:
    lines = {
        "name": found.name,
        "path": found.path,
        "format": _format(found),
        "architecture": found.architecture,
        "parameters": _count(found.parameters),
        "size": _size(found.size_bytes),
        "takes": ", ".join(takes(found)) or None,
        "runs here": f"no: {_reason(found)}" if found.problem else "yes",
    }
    for label, value in lines.items():
        if value is not None:
            click.echo(f"{label:<14}{value}")


def takes(found: ModelRecord) -> tuple[str, ...]:
    """The kinds of items, such as "image", that prompts of a model may have beside text."""
    if found.path is None or found.problem:
        return ()
    from shmllm.cli.items import modalities_of
    from shmllm.errors import EngineStartError
    from shmllm.frontend.model_files import has_projector, resolve_model

    path = Path(found.path)
    try:
        return modalities_of(resolve_model(str(path)) if has_projector(path) else path)
    except EngineStartError:
        return ()


def _format(found: ModelRecord) -> str | None:
    return " ".join(filter(None, (found.format, found.quantization))) or None


def _reason(found: ModelRecord) -> str:
    return "; ".join(filter(None, (found.problem, found.remedy)))


def _count(parameters: int | None) -> str | None:
    if parameters is None:
        return None
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"


def _size(num_bytes: int | None) -> str | None:
    from shmllm.frontend.model_catalog import gibibytes

    return None if num_bytes is None else gibibytes(num_bytes)
