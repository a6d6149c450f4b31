"""``omnisim subjects``: the releases of vllm-omni that can be put under test."""

from __future__ import annotations

from typing import Annotated

import typer

from omnisim.cli.common import complain, console
from omnisim.errors import OmnisimError, UsageError

__all__ = ["subjects"]

subjects = typer.Typer(
    name="subjects",
    rich_markup_mode="markdown",
    help="Fetch releases of vllm-omni to put their caches under test: the wheels alone, into a folder of their own.",
)


@subjects.callback(invoke_without_command=True)
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        _list()


@subjects.command("list")
def _list() -> None:
    """Show what can be put under test, and which releases are here; so does `omnisim subjects` alone.

    Examples:

    - `omnisim subjects list`
    """
    from packaging.version import Version
    from rich.table import Table

    from omnisim.subjects import store, subject_names

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("subject", "here", "size", "sha256", "from"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for name in subject_names():
        table.add_row(name, "always")
    there = {release.version: release for release in store.installed()}
    for version in sorted({*store.RELEASES, *there}, key=Version):
        if (release := there.get(version)) is None:
            table.add_row(f"vllm-omni:{version}", "no")
        else:
            size = f"{release.num_bytes / 1e6:.1f} MB"
            table.add_row(f"vllm-omni:{version}", "yes", size, release.sha256[:16], f"the {release.origin}")
    others = Table.grid(padding=(0, 2))
    others.add_row("installed", "the vllm-omni of this environment")
    others.add_row("path:DIR", "an unpacked wheel, or a checkout")
    others.add_row("module:Class", "any class with the surface of OmniTensorPrefixCache; file.py:Class too")
    console().print(table, "", others, sep="\n")


@subjects.command("install")
def _install(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERSION|FILE", help="Versions on the index, or wheels.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every release that was tried with this omnisim.")] = False,
) -> None:
    """Fetch wheels by pip, without what they depend on, unless they are here. Later, no network is needed.

    Each must have the hash that the index tells, and in it the files that it lists. A wheel that is given as a file
    takes the place of what is here.

    Examples:

    - `omnisim subjects install 0.28.0 0.30.0`
    - `omnisim subjects install --all`
    """
    from omnisim.subjects import store

    wanted = list(dict.fromkeys([*(what or []), *(store.RELEASES if every else ())]))
    if not wanted:
        raise UsageError("there is nothing to install", f"name some of {', '.join(store.RELEASES)}, or use --all")
    out, failed = console(), False
    for one in wanted:
        try:
            release = store.install(one)
        except OmnisimError as error:
            complain(error)
            failed = True
            continue
        by = "the hash that the index tells" if release.origin == "index" else "from a file"
        out.print(f"vllm-omni:{release.version}  {release.num_bytes / 1e6:.1f} MB, sha256 {release.sha256}, {by}")
    raise typer.Exit(2 if failed else 0)


@subjects.command("remove")
def _remove(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION", help="Versions that are here.")],
) -> None:
    """Delete what was fetched.

    Examples:

    - `omnisim subjects remove 0.20.0`
    """
    from omnisim.subjects import store

    for version in versions:
        store.remove(version)


@subjects.command("path")
def _path(
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help="One release.", show_default=False)] = None,
) -> None:
    """Print the folder of a release, or of all.

    Examples:

    - `omnisim subjects path 0.28.0`
    """
    from omnisim.subjects import store

    typer.echo(store.folder(version) if version is not None else store.home() / "subjects")
