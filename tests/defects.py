"""The page of ``traces/defects`` as it should be: its table is made of the traces themselves.

``python -m tests.defects`` writes it; ``tests/replay/test_defects.py`` compares.
"""

from __future__ import annotations

from pathlib import Path

from omnisim.trace import load

FOLDER = Path(__file__).parents[1] / "traces" / "defects"
PAGE = FOLDER / "README.md"
RELEASES = ("0.20", "0.22", "0.24", "0.26", "0.28", "0.30")
SUBJECTS = ("builtin", "none", *(f"vllm-omni:{release}.0" for release in RELEASES))
SYMBOLS = {"agreement": "✓", "divergence": "✗", "refusal": "R", "crash": "C", "unusable": "-"}
WORDS = """# Defects that were seen

Schedules in which caches of rows have gone wrong, told as small traces: each is made after a public report, or after
a finding on released code, and shows one behaviour. `expect` in each trace is what its replay was measured to give,
for this project's cache (`builtin`), for no cache at all (`none`) and for six releases of vllm-omni. What happens in
a trace, and who is due what, stands at its top; `omnisim replay traces/defects/same-step-hit.yaml --subject none`
says what went wrong, and why.

✓ agreement: everybody got what was due. ✗ divergence: something else was handed out. R: it refused, by an error of its
own. C: it crashed. -: the trace contradicts itself, and nothing was judged. Releases 0.24 to 0.28 write as they do on
CUDA, one step late. 0.20 cannot defer: it stores deferred keys at once.

"""


def page() -> str:
    """The page with a row for each trace."""
    heads = ["trace", "what it shows", "source", "builtin", "none", *RELEASES]
    lines = [heads, ["---", "---", "---", *[":-:"] * len(SUBJECTS)], *map(_row, paths())]
    return WORDS + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def paths() -> list[Path]:
    """The traces, by name."""
    return sorted(FOLDER.glob("*.yaml"))


def summary(path: Path) -> str:
    """The first sentence of the comment that starts a trace."""
    lines = path.read_text().partition("\n\n")[0].splitlines()
    return " ".join(line.removeprefix("# ") for line in lines).partition(". ")[0].removesuffix(".") + "."


def _row(path: Path) -> list[str]:
    header = load(path).header
    source = header.provenance.removesuffix(". Apache-2.0.").replace("vllm-project/", "")
    outcomes = [SYMBOLS[header.expect[subject]] for subject in SUBJECTS]
    return [f"[{path.stem}]({path.name})", summary(path), source, *outcomes]


if __name__ == "__main__":
    PAGE.write_text(page())
