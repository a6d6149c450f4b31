"""The talkers that come with omnisim load; a talker file that is wrong is refused in one line that says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim import talkers
from omnisim.errors import FileError, OmnisimError, UsageError
from omnisim.rows.emit import OwnerRows
from omnisim.rows.naming import ContentNames
from omnisim.talker import KeySpec, Talker
from omnisim.talkers import check_talker, load_talker, talker_names
from omnisim.trace.story import story_trace

HEAD = "format: omnisim-talker/1\nname: mine\nhidden_size: 8\n"
KINDS = {"row", "decode-row", "request", "shared", "list", "list-of-one", "nested", "opaque"}


def test_these_talkers_come_with_omnisim() -> None:
    assert talker_names() == ("deferred-codes", "hidden-only", "late-codes", "thinker", "tts")


@pytest.mark.parametrize("name", talker_names())
def test_a_talker_of_ours_has_its_name_a_summary_and_sources_and_can_be_emitted(name: str) -> None:
    talker = load_talker(name)
    rows, names = OwnerRows(talker), ContentNames()
    assert talker.name == name
    assert talker.summary.endswith(".")
    assert all(source.startswith("vllm-omni 0.") for source in talker.sources)
    assert talker.sources
    for step in story_trace("new A c=0 n=6 [1,2]; new B c=0 n=3 [3]\nrun A c=6 n=1; run B c=3 n=1").steps():
        rows.forward(step, names.advance(step))
    assert rows.narrow_keys() == {}


def test_every_kind_of_key_is_in_some_talker_of_ours() -> None:
    specs = [spec for name in talker_names() for spec in load_talker(name).keys.values()]
    assert {s.kind for spec in specs for s in (spec, *spec.fields.values())} == KINDS


def test_what_the_talkers_are_for() -> None:
    assert load_talker("hidden-only").keys == {}
    assert load_talker("tts").deferred_keys == load_talker("deferred-codes").deferred_keys == {"codes.audio"}
    assert not load_talker("tts").requires_full_prefix_cached_hidden_states
    assert all(spec.phases == ("decode",) for spec in load_talker("late-codes").keys.values())
    assert all(spec.padded for spec in load_talker("thinker").keys.values() if spec.kind == "row")


def test_a_talker_is_read_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "keys: {codes.audio: {kind: row, shape: [16], dtype: int64}}\n")
    assert load_talker(str(path)).keys == {"codes.audio": KeySpec(kind="row", shape=(16,), dtype="int64")}


def test_an_installed_wheel_has_them_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "omnisim" / "_scenarios" / "talkers"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(HEAD)
    monkeypatch.setattr(talkers, "__file__", str(tmp_path / "omnisim" / "talkers.py"))
    assert talker_names() == ("mine",)
    assert load_talker("mine").hidden_size == 8


KNOWN = "known: deferred-codes, hidden-only, late-codes, thinker, tts; or name a .yaml file"


@pytest.mark.parametrize(
    ("name", "hint"), [("thinkr", f"did you mean 'thinker'? {KNOWN}"), ("whisper", KNOWN)], ids=str
)
def test_an_unknown_name_is_answered_with_the_known_ones_and_the_closest(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_talker(name)
    assert str(refused.value) == f"unknown talker {name!r}; {hint}"


WRONG = {
    "no hidden size": (
        "format: omnisim-talker/1\nname: mine\n",
        "1: object missing required field hidden_size; add it",
    ),
    "another format": (
        "format: omnisim-talker/9\nname: mine\nhidden_size: 8\n",
        "1: format 'omnisim-talker/9' is not known; this omnisim reads 'omnisim-talker/1'",
    ),
    "a field that does not exist": (
        HEAD + "keys:\n  K: {kind: row, shapes: [4]}\n",
        "5: keys[...]: object contains unknown field shapes; did you mean 'shape'?",
    ),
    "a key twice": (
        HEAD + "keys:\n  K: {kind: shared}\n  K: {kind: shared}\n",
        "6: the key 'K' is there twice; keep one of them",
    ),
    "hidden_states": (
        HEAD + "keys:\n  hidden_states: {kind: row, shape: [8]}\n",
        "5: key 'hidden_states': hidden_states is not one of the keys; hidden_size and dtype declare it",
    ),
    "a deferred value": (
        HEAD + "keys:\n  K: {kind: list, shape: [4], deferred: true}\n",
        "5: key 'K': only rows with a shape can be deferred; leave deferred out, or give a shape",
    ),
    "deferred metadata": (
        HEAD + "keys:\n  K: {kind: row, deferred: true}\n",
        "5: key 'K': only rows with a shape can be deferred; leave deferred out, or give a shape",
    ),
    "a value that is left zeros": (
        HEAD + "keys:\n  K: {kind: request, filled: last}\n",
        "5: key 'K': only rows with a shape can be left zeros; leave filled out",
    ),
    "a padded value": (
        HEAD + "keys:\n  K: {kind: request, padded: true}\n",
        "5: key 'K': only rows arrive padded; leave padded out",
    ),
    "nested without fields": (
        HEAD + "keys:\n  K: {kind: nested}\n",
        "5: key 'K': fields are for kind nested, which needs some; see KeySpec",
    ),
    "fields of a row": (
        HEAD + "keys:\n  K: {kind: row, shape: [4], fields: {a: {kind: shared}}}\n",
        "5: key 'K': fields are for kind nested, which needs some; see KeySpec",
    ),
    "opaque without a value": (
        HEAD + "keys:\n  K: {kind: opaque}\n",
        "5: key 'K': kind opaque needs a value; value: null is one too",
    ),
    "an opaque field without a value": (
        HEAD + "keys:\n  M: {kind: nested, fields: {a: {kind: opaque}}}\n",
        "5: key 'a': kind opaque needs a value; value: null is one too",
    ),
    "a value of a row": (
        HEAD + "keys:\n  K: {kind: row, shape: [4], value: 3}\n",
        "5: key 'K': a value is for kind opaque; leave it out",
    ),
    "no phase": (
        HEAD + "keys:\n  K: {kind: row, shape: [4], phases: []}\n",
        "5: key 'K': a key that is emitted in no phase; leave phases out, or name prefill or decode",
    ),
    "an empty shape": (
        HEAD + "keys:\n  K: {kind: row, shape: [4, 0]}\n",
        "5: key 'K': a shape with a 0 in it; leave the key out",
    ),
    "a huge row": (
        HEAD + "keys:\n  K: {kind: row, shape: [65536, 65536]}\n",
        "5: key 'K': a row of 4,294,967,296 elements; no model emits that",
    ),
    "a field that is wrong": (
        HEAD + "keys:\n  meta.x:\n    kind: nested\n    fields:\n      a: {kind: shared}\n"
        "      b: {kind: shared, padded: true}\n",
        "9: key 'meta.x.b': only rows arrive padded; leave padded out",
    ),
    "a deferred field": (
        HEAD + "keys:\n  M: {kind: nested, fields: {a: {kind: row, shape: [4], deferred: true}}}\n",
        "5: key 'M.a': only a whole key can be deferred; leave deferred out",
    ),
    "a change of no key": (
        HEAD + "keys:\n  K: {kind: row, shape: [4]}\nchanges:\n  1:\n    L: {kind: shared}\n",
        "8: key 'L' changes in step 1: it is not one of the keys; see Talker.changes",
    ),
    "a change into rows": (
        HEAD + "keys:\n  K: {kind: shared}\nchanges:\n  1: {K: {kind: row, shape: [4]}}\n",
        "7: key 'K' changes in step 1: only a key that is declared as rows with a shape can become one; "
        "see Talker.changes",
    ),
    "hidden states that change into no rows": (
        HEAD + "changes:\n  1: {hidden_states: {kind: shared}}\n",
        "5: key 'hidden_states' changes in step 1: hidden states are rows with a shape; see Talker.changes",
    ),
    "a change that is wrong": (
        HEAD + "keys:\n  K: {kind: row, shape: [4]}\nchanges:\n  1:\n    K: {kind: shared, padded: true}\n",
        "8: key 'K': only rows arrive padded; leave padded out",
    ),
    "an opaque change without a value": (
        HEAD + "keys:\n  K: {kind: row, shape: [4]}\nchanges:\n  1: {K: {kind: opaque}}\n",
        "7: key 'K': kind opaque needs a value; value: null is one too",
    ),
    "entries of what is no list": (
        HEAD + "keys:\n  K: {kind: request, shape: [4], entries: 1}\n",
        "5: key 'K': only a list can be short of entries; leave entries out",
    ),
    "phases of a field": (
        HEAD + "keys:\n  M: {kind: nested, fields: {a: {kind: shared, phases: [decode]}}}\n",
        "5: key 'M.a': a field is emitted whenever its key is; give 'M' the phases",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_wrong_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, line = WRONG[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(FileError) as refused:
        load_talker(str(path))
    assert str(refused.value) == f"{path}:{line}"


def test_a_null_is_a_value_of_an_opaque_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "keys: {K: {kind: opaque, value: null}}\n")
    assert load_talker(str(path)).keys["K"].value is None


def test_a_file_that_is_missing_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(OmnisimError) as refused:
        load_talker(str(tmp_path / "none.yaml"))
    assert str(refused.value) == (
        f"{tmp_path}/none.yaml: no such talker file; "
        "talkers with a name: deferred-codes, hidden-only, late-codes, thinker, tts"
    )


def test_a_talker_that_stands_in_a_trace_is_checked_like_a_file() -> None:
    wrong = Talker(format="omnisim-talker/1", name="mine", hidden_size=8, keys={"M": KeySpec(kind="nested")})
    with pytest.raises(FileError) as refused:
        check_talker(wrong, "t.jsonl:1")
    assert str(refused.value) == (
        "t.jsonl:1: talker 'mine', key 'M': fields are for kind nested, which needs some; see KeySpec"
    )
    for name in talker_names():
        check_talker(load_talker(name), "t.jsonl:1")
