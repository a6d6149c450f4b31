"""The README as it should be: its tables and outputs filled in with what the program really says.

``python -m tests.readme`` writes README.md and docs/replay.svg; ``tests/test_readme.py`` compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SVG = ROOT / "docs" / "replay.svg"
COLUMNS = "104"
SHOWN = (
    "omnisim replay traces/recorded/chat-burst.jsonl.zst --talker thinker",
    "omnisim replay traces/recorded/chat-burst.jsonl.zst --subject none",
)


def filled(text: str) -> str:
    """``text`` with the output under each ``$`` line, the table of checks and the output of the Python example."""
    text = re.sub(r"```console\n\$ (.*)\n(?:.*\n)*?```", lambda found: _console(found[1]), text)
    text = re.sub(
        r"(\| id \| what must hold \|\n\| --- \| --- \|\n)(?:.*\n)+?\n", lambda found: found[1] + _checks(), text
    )
    example = re.search(r"```python\n((?:.*\n)*?)```", text)
    assert example is not None
    shown = f"```text\n{_printed(example[1])}```"
    return text[: example.end()] + re.sub(r"```text\n(?:.*\n)*?```", lambda _: shown, text[example.end() :], count=1)


def _console(command: str) -> str:
    return f"```console\n$ {command}\n{output_of(command)}\n```"


def output_of(command: str) -> str:
    """What a command prints in a pipe, without the blanks at the ends of lines."""
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def _checks() -> str:
    from omnisim.checks import CHECKS

    return "".join(f"| `{check}` | {sentence} |\n" for check, sentence in CHECKS.items()) + "\n"


def _printed(code: str) -> str:
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        exec(code, {})  # noqa: S102 - the README's own example
    return printed.getvalue()


def svg() -> str:
    """The commands of ``SHOWN`` as a picture of a terminal."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console

    from omnisim.report.terminal import print_run
    from omnisim.trace import load
    from omnisim.verify import Options, verify

    console = Console(record=True, width=int(COLUMNS), file=io.StringIO(), force_terminal=True, highlight=False)
    with contextlib.chdir(ROOT):
        for command in SHOWN:
            path, option, value = shlex.split(command)[2:]
            console.print(f"[bold green]$[/] [bold]{command}[/]", soft_wrap=True)
            print_run(console, verify(load(path), Options(**{option.removeprefix("--"): value})))  # type: ignore[arg-type]
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # from a server
    return console.export_svg(title="omnisim", code_format=without_fonts.replace("Fira Code, monospace", "monospace"))


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
    SVG.write_text(svg())
