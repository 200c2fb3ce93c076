"""`shmllm plugins`: lists the installed plugins, and whether each can be loaded."""

from __future__ import annotations

import json

import click

from shmllm.cli.listing import print_records

COLUMNS = ("group", "name", "value", "package", "state")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def plugins(as_json: bool) -> None:
    """List the plugins of installed packages: their group, name, value, package, and whether each
    is loaded, is excluded by SHMLLM_PLUGINS or VLLM_PLUGINS, or which error its import raises.

    The command imports each plugin, but calls none.
    """
    from shmllm.plugins.entry_points import describe_plugins

    found = describe_plugins()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        print_records(COLUMNS, found, shrinking=("value", "state"))
    else:
        click.echo("no plugin is installed; docs/plugins.md says what one is", err=True)
