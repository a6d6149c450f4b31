"""What a person sees: in a pipe whole and plain, on a terminal with colour and a bar; nothing that a trace forges."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnisim import __version__

from .conftest import Run
from .files import FIRST, GOOD, HELLO, ROOT, TIGHT, hit, lines

Written = Callable[[str, bytes | str], Path]
OMNISIM = [sys.executable, "-m", "omnisim"]
ODD = ["[red]x[/]", "[/]", "a b  c", "ünï 日本", "\u202eabc", "a\nb", "\x1b[31mred", "a\tb", "it's", "\\", "x" * 300]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


def in_a_pipe(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OMNISIM, *map(str, words)], capture_output=True, text=True, check=False, env=environment(), **options
    )


def on_a_terminal(*words: object, **more: str) -> str:
    """All that a terminal is sent, stdout and stderr."""
    lead, follow = pty.openpty()
    child = subprocess.Popen(
        [*OMNISIM, *map(str, words)], stdin=follow, stdout=follow, stderr=follow, env=environment(COLUMNS="100", **more)
    )
    os.close(follow)
    sent = b""
    while True:
        try:
            piece = os.read(lead, 65536)
        except OSError:  # what Linux says when the last writer is gone
            break
        if not piece:
            break
        sent += piece
    os.close(lead)
    child.wait()
    return sent.decode()


# Pipes and terminals


def test_a_pipe_gets_no_colour_no_bar_and_no_blanks_at_the_ends_of_lines() -> None:
    done = in_a_pipe("replay", HELLO, TIGHT, "--subject", "none")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert not re.search(r" $", done.stdout, re.MULTILINE)


def test_a_terminal_gets_colour_and_a_bar_that_goes_away() -> None:
    sent = on_a_terminal("replay", TIGHT)
    assert "\x1b[1;32mAGREEMENT" in sent
    assert "steps" in sent.partition("AGREEMENT")[0]
    assert "chat-tight.jsonl.zst" in sent.partition("AGREEMENT")[0]
    assert "steps" not in re.sub(r"86 steps", "", sent.partition("AGREEMENT")[2])


def test_no_color_is_heeded() -> None:
    sent = on_a_terminal("replay", HELLO, "--subject", "none", NO_COLOR="1")
    assert "DIVERGENCE" in sent
    assert not re.search(r"\x1b\[[\d;]*\b(3[0-7]|9[0-7]|38)\b[\d;]*m", sent)


def test_a_terminal_of_no_wit_gets_plain_text() -> None:
    assert "\x1b" not in on_a_terminal("show", HELLO, TERM="dumb")


def test_with_json_on_stdout_there_is_nothing_else_there() -> None:
    done = in_a_pipe("replay", HELLO, "--json", "-")
    assert json.loads(done.stdout)["outcome"] == "agreement"
    assert done.stderr == ""
    sent = on_a_terminal("replay", TIGHT, "--json", "-")
    assert '"outcome": "agreement"' in sent
    assert "AGREEMENT" not in sent


def test_a_pipe_breaks_no_line_and_cuts_nothing_off(run: Run, written: Written) -> None:
    req_id, key = "r" * 500, "k" * 400
    talker = {
        "format": "omnisim-talker/1",
        "name": "t" * 200,
        "hidden_size": 8,
        "keys": {key: {"kind": "row", "shape": [4], "dtype": "int64"}},
    }
    path = written("/".join(["p" * 100] * 3) + "/t.jsonl", lines(*hit(req_id), talker=talker))
    done = run("replay", path, "--subject", "none")
    assert f"  again: omnisim replay {path} --subject none --steps 1:2\n" in done.out
    for fact in (str(path), f"request {req_id}", key, "t" * 200):
        assert fact in done.out
    for words in (["show", path], ["show", path, "--step", 1], ["show", path, "--request", req_id]):
        assert req_id in run(*words).out
    assert str(path) in run("check", path).out


def test_columns_makes_a_page_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("show", HELLO)
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["show", TIGHT], ["replay", HELLO, "--subject", "none"]):
        done = run(*words)
        assert max(len(line) for line in done.out.splitlines() if "traces/" not in line) <= 80


@pytest.mark.parametrize(
    "words", [["show", TIGHT], ["replay", ROOT / "traces" / "recorded", "--json", "-"], ["replay", TIGHT]]
)
def test_a_reader_that_goes_away_is_no_reason_to_complain(words: list[object]) -> None:
    child = subprocess.Popen(
        [*OMNISIM, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 128 + signal.SIGPIPE
    child.stderr.close()


def test_ctrl_c_ends_it_at_once_without_a_traceback(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import pathlib, time\nfrom omnisim.cli import main\nfrom omnisim.subjects import _SUBJECTS\n"
        "from omnisim.subjects.none import KeepsNothing\n"
        "class Slow(KeepsNothing):\n"
        f"    def begin(self, *_): pathlib.Path({str(started)!r}).touch(); time.sleep(60)\n"
        "_SUBJECTS['slow'] = Slow\nmain()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "replay", str(HELLO), "--subject", "slow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    while not started.exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (130, b"", b"")


# What a trace says is shown and not obeyed


@pytest.mark.parametrize("req_id", ODD)
def test_an_id_is_shown_as_it_is_or_escaped(run: Run, written: Written, req_id: str) -> None:
    shown = req_id if req_id.isprintable() else req_id.encode("unicode_escape").decode()
    path = written("t.jsonl", lines(*hit(req_id)))
    for words in (
        ["show", path],
        ["show", path, "--step", 1],
        ["show", path, "--request", req_id],
        ["replay", path, "--subject", "none"],
    ):
        done = run(*words)
        assert done.err == ""
        assert shown in done.out or f"'{shown}'" in done.out
        assert all(line.isprintable() for line in done.out.split("\n"))


@pytest.mark.parametrize("key", [key for key in ODD if "." not in key])
def test_a_key_is_shown_as_it_is_or_escaped(run: Run, written: Written, key: str) -> None:
    keys = {key: {"kind": "row", "shape": [4], "dtype": "int64"}, "v": {"kind": "opaque", "value": key}}
    talker = {"format": "omnisim-talker/1", "name": key, "hidden_size": 8, "keys": keys}
    done = run("replay", written("t.jsonl", lines(*hit(), talker=talker)), "--subject", "none")
    assert done.code == 1
    assert all(line.isprintable() for line in done.out.split("\n"))
    assert (key if key.isprintable() else key.encode("unicode_escape").decode()) in done.out


@pytest.mark.parametrize("name", ["[red]x[bold]", "a b", "ü", "a\nb", "\x1b[31m"])
def test_a_path_is_shown_as_it_is_or_escaped(run: Run, written: Written, name: str, tmp_path: Path) -> None:
    path = written(f"{name}.jsonl", GOOD)
    shown = name if name.isprintable() else name.encode("unicode_escape").decode()
    target = tmp_path / f"{name}.yaml"
    for words in (["show", path], ["check", path], ["replay", path], ["convert", path, target]):
        done = run(*words)
        assert done.code == 0
        assert shown in done.out
        assert all(line.isprintable() for line in done.out.split("\n"))
    done = run("check", path.with_name(f"{name}.missing"))
    assert shown in done.err
    assert done.err.count("\n") == 1


def test_a_name_of_no_encoding_is_shown_escaped(run: Run, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text(GOOD)
    assert r"caf\udce9.jsonl" in run("replay", path).out
    assert run("replay", path, "--json", "-").report["runs"][0]["trace"] == str(path)


def test_a_terminal_that_knows_ascii_only_is_served_too(written: Written) -> None:
    path = written("t.jsonl", lines(*hit("ünï 日本")))
    done = subprocess.run(
        [*OMNISIM, "replay", str(path), "--subject", "none"],
        capture_output=True,
        check=False,
        env=environment(PYTHONIOENCODING="ascii"),
    )
    assert done.returncode == 1
    assert b"request \\xfcn\\xef" in done.stdout
    assert done.stderr == b""


def test_provenance_and_producer_are_shown_and_not_obeyed(run: Run, written: Written) -> None:
    producer = {"name": "[red]me[/]", "version": "\x1b]0;title\x07"}
    path = written("t.jsonl", lines(*hit(), producer=producer, provenance="[bold]one[/]\n\x1b[2J two"))
    for command in ("show", "check"):
        out = run(command, path).out
        assert "[red]me[/]" in out
        assert all(line.isprintable() for line in out.split("\n"))
    assert "[bold]one[/]" in run("show", path).out


# Files as they come


def test_line_ends_of_windows_do_no_harm_nor_does_a_byte_order_mark_in_yaml(run: Run, written: Written) -> None:
    crlf = HELLO.read_bytes().replace(b"\n", b"\r\n")
    assert "3 steps, 3 requests" in run("check", written("t.yaml", b"\xef\xbb\xbf" + crlf)).out
    assert "2 steps" in run("check", written("t.jsonl", GOOD.replace("\n", "\r\n"))).out


@pytest.mark.parametrize(
    ("cache", "blocks"),
    [({"num_blocks": 1, "block_size": 4}, [0]), ({"num_blocks": 4, "block_size": 1}, [3, 1, 0, 2])],
)
def test_the_smallest_caches_are_replayed(run: Run, written: Written, cache: dict[str, int], blocks: list[int]) -> None:
    path = written("t.jsonl", lines({**FIRST, "block_ids": {"A": blocks}}, cache=cache))
    for command in ("replay", "show", "check"):
        assert "1 step, 1 request" in run(command, path).out


def test_a_folder_that_contains_itself_is_read_once(run: Run, written: Written, tmp_path: Path) -> None:
    written("a.jsonl", GOOD)
    (tmp_path / "me").symlink_to(".")
    assert run("check", tmp_path).out.count("legal") == 1


def test_a_long_line_is_read(run: Run, written: Written) -> None:
    prompt = list(range(50_000))
    first = {
        **FIRST,
        "scheduled_new_reqs": [{"req_id": "A", "prompt_token_ids": prompt}],
        "num_scheduled_tokens": [len(prompt)],
        "block_ids": {"A": [*range(1, 3126)]},
    }
    path = written("t.jsonl", lines(first, cache={"num_blocks": 4000, "block_size": 16}))
    assert "50,000 tokens" in run("check", path).out
    assert "1-3125" in run("show", path, "--step", 0).out


# The command itself


def test_it_is_a_module_and_says_its_version(run: Run) -> None:
    assert in_a_pipe("--version").stdout == f"omnisim {__version__}\n"
    assert run("--version") == (0, f"omnisim {__version__}\n", "")


def test_without_a_stdout_the_exit_code_is_still_right() -> None:
    for words, code in ((["--json", "-"], 1), ([], 1), (["--subject", "builtin"], 0)):
        line = [*OMNISIM, "replay", str(HELLO), "--subject", "none", *words]
        done = subprocess.run(
            ["sh", "-c", '"$@" >&-', "sh", *line], env=environment(), capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (code, b"")


def test_a_narrow_page_keeps_its_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("show", HELLO)
    monkeypatch.setenv("COLUMNS", "30")
    assert "hidden_states          5        0      26        0         14        12" in run("replay", HELLO).out


def test_a_key_too_narrow_to_tell_its_rows_apart_is_said_to_be(run: Run, written: Written) -> None:
    keys = {"x": {"kind": "row", "shape": [1], "dtype": "bool"}}
    talker = {"format": "omnisim-talker/1", "name": "narrow", "hidden_size": 8, "dtype": "bool", "keys": keys}
    out = run("replay", written("t.jsonl", lines(*hit(), talker=talker))).out
    told = "  note: key {}: its rows have room for {} bits of identity, so a wrong row passes for the right one {}\n"
    assert told.format("'hidden_states'", 7, "once in 128") in out
    assert told.format("'x'", 0, "always") in out
