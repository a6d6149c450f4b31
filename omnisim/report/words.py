"""Small words that every rendering needs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["literal", "num", "print_table"]

_MIN_WIDTH = 78
"""Of a table; rich would rather leave out columns of a table that does not fit."""


def literal(text: str) -> str:
    """What a trace or a file name says, in one line that moves no cursor: what does not print is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def num(count: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_table(console: Console, table: Table, indent: int = 2) -> None:
    """The table without blanks at the ends of its lines."""
    options = console.options.update(width=max(console.width - indent, _MIN_WIDTH))
    for segments in console.render_lines(table, options, pad=False):
        line = Text(" " * indent).append_tokens((segment.text, segment.style) for segment in segments)
        line.rstrip()
        console.print(line, soft_wrap=True)
