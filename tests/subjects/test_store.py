"""Releases are fetched, checked, found again without a network, and deleted; what goes wrong is one line."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from omnisim.errors import OmnisimError
from omnisim.subjects import store

from ..cli.conftest import Run
from ..cli.conftest import run as run

CACHE = "vllm_omni/core/prefix_cache.py"
FILES = {"vllm_omni/__init__.py": b"", CACHE: b"class OmniTensorPrefixCache: ...\n"}
NO_NETWORK = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_EXTRA_INDEX_URL": ""}

Wheel = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own."""
    monkeypatch.setenv("OMNISIM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """``wheel(name, files, recorded)``: a wheel of these files, whose RECORD is that of the files ``recorded``."""

    def write(
        name: str = "vllm_omni-0.28.0-py3-none-any.whl",
        files: dict[str, bytes] = FILES,
        recorded: dict[str, bytes] | None = None,
    ) -> Path:
        path, info = tmp_path / name, "-".join(name.split("-")[:2]) + ".dist-info"
        told = {**(files if recorded is None else recorded), f"{info}/WHEEL": b"Wheel-Version: 1.0\n"}
        record = "".join(f"{file},sha256={_digest(content)},{len(content)}\n" for file, content in told.items())
        with zipfile.ZipFile(path, "w") as archive:
            for file, content in {**files, f"{info}/WHEEL": b"Wheel-Version: 1.0\n"}.items():
                archive.writestr(file, content)
            archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
        return path

    return write


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def refused(what: str | Path) -> str:
    with pytest.raises(OmnisimError) as caught:
        store.install(str(what))
    assert "\n" not in str(caught.value)
    assert store.installed() == []
    assert not list((store.home() / "subjects").glob("*")), "nothing is left behind"
    return str(caught.value)


def test_a_wheel_is_unpacked_found_and_deleted(wheel: Wheel, home: Path) -> None:
    path = wheel()
    told = store.install(str(path))
    assert (told.version, told.origin) == ("0.28.0", "file")
    assert told.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.installed() == [told]
    assert store.folder("0.28") == store.folder("vllm-omni:0.28.0") == home / "subjects" / "vllm-omni-0.28.0"
    assert (store.folder("0.28.0") / CACHE).is_file()
    store.remove("0.28.0")
    assert store.installed() == []


def test_a_wheel_given_as_a_file_takes_the_place_of_what_is_here(wheel: Wheel) -> None:
    store.install(str(wheel()))
    new = {**FILES, CACHE: b"class OmniTensorPrefixCache:\n    new = True\n"}
    store.install(str(wheel(files=new)))
    assert (store.folder("0.28.0") / CACHE).read_bytes() == new[CACHE]
    assert len(list((store.home() / "subjects").iterdir())) == 1


BAD_WHEELS = {
    "another project": ("torch-2.0-py3-none-any.whl", FILES, None, "this is torch, not vllm-omni"),
    "no name of a wheel": ("cache.whl", FILES, None, "not the name of a wheel"),
    "no cache of rows": ("vllm_omni-0.18.0-py3-none-any.whl", {"vllm_omni/a.py": b""}, None, "has no cache of rows"),
    "no package": ("vllm_omni-0.28.0-py3-none-any.whl", {"other.py": b""}, None, "there is no vllm_omni/ in it"),
    "a changed file": ("vllm_omni-0.28.0-py3-none-any.whl", FILES, {**FILES, CACHE: b"class Other: ...\n"}, CACHE),
    "a file too many": (
        "vllm_omni-0.28.0-py3-none-any.whl", {**FILES, "vllm_omni/more.py": b""}, FILES, "vllm_omni/more.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "files", "recorded", "words"), BAD_WHEELS.values(), ids=BAD_WHEELS)
def test_a_wheel_that_is_not_what_it_should_be_is_refused(
    wheel: Wheel, name: str, files: dict[str, bytes], recorded: dict[str, bytes] | None, words: str
) -> None:
    assert words in refused(wheel(name, files, recorded))


def test_a_damaged_or_missing_file_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    path = wheel()
    whole = path.read_bytes()
    assert "there is no such file" in refused(tmp_path / "vllm_omni-0.30.0-py3-none-any.whl")
    for damaged in (whole[: len(whole) // 2], b"", b"not a zip", whole.replace(b"class", b"klass")):
        path.write_bytes(damaged)
        assert "not a wheel, or a damaged one" in refused(path)


def test_a_version_that_is_none_is_told_which_are_known() -> None:
    assert f"known: {', '.join(store.RELEASES)}" in refused("latest")
    for ask in (store.folder, store.remove):
        with pytest.raises(OmnisimError) as caught:
            ask("0.29.0")
        assert "0.29.0" in str(caught.value)


def test_what_is_not_here_says_how_to_have_it() -> None:
    with pytest.raises(OmnisimError) as caught:
        store.folder("0.28.0")
    assert str(caught.value) == "vllm-omni:0.28.0 is not here yet; omnisim subjects install 0.28.0"


def test_no_network_is_said_and_what_is_here_needs_none(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    assert "the index does not answer" in refused("0.28.0")
    store.install(str(wheel()))
    assert store.install("0.28.0").origin == "file", "nobody was asked"


def test_no_pip_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "there is no pip in this environment" in refused("0.28.0")


def test_a_hash_that_is_not_the_one_of_the_index_is_refused(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    content = wheel().read_bytes()
    report = '{"install": [{"download_info": {"url": "u", "archive_info": {"hashes": {"sha256": "%s"}}}}]}'

    def pip(version: str, command: str, *words: str) -> bytes:
        if command == "download":
            (Path(words[1]) / "vllm_omni-0.28.0-py3-none-any.whl").write_bytes(content)
        return (report % told).encode()

    monkeypatch.setattr(store, "_pip", pip)
    told = "0" * 64
    assert "its hash is another" in refused("0.28.0")
    told = hashlib.sha256(content).hexdigest()
    assert store.install("0.28.0").sha256 == told


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_said(
    wheel: Wheel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = wheel()
    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", full)
        assert f"{home / 'subjects'}: No space left on device" in refused(path)
    home.mkdir(exist_ok=True)
    (home / "subjects").rmdir()
    (home / "subjects").write_text("a file")
    with pytest.raises(OmnisimError, match="free or make writable, or set OMNISIM_HOME"):
        store.install(str(path))


def test_the_commands_say_what_was_done(wheel: Wheel, run: Run, home: Path) -> None:
    path = wheel()
    done = run("subjects", "install", path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("vllm-omni:0.28.0  ")
    assert "from a file" in done.out
    assert "vllm-omni:0.28.0  yes" in run("subjects", "list").out
    assert "vllm-omni:0.30.0  no" in run("subjects").out
    assert run("subjects", "path", "0.28.0").out == f"{home / 'subjects' / 'vllm-omni-0.28.0'}\n"
    assert run("subjects", "path").out == f"{home / 'subjects'}\n"
    assert run("subjects", "remove", "0.28.0").code == 0
    assert run("subjects", "remove", "0.28.0").code == 2
    nothing = run("subjects", "install")
    assert (nothing.code, nothing.out) == (2, "")
    assert "there is nothing to install" in nothing.err


@pytest.mark.slow
def test_the_index_vouches_for_what_is_fetched_from_it() -> None:
    if "OMNISIM_TEST_RELEASES" not in os.environ:
        pytest.skip("OMNISIM_TEST_RELEASES is not set: the index is not asked")
    told = store.install("0.20.0")
    assert (told.version, told.origin, len(told.sha256)) == ("0.20.0", "index", 64)
    assert (store.folder("0.20.0") / CACHE).is_file()
