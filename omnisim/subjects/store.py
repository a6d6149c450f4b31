"""The releases of vllm-omni that were fetched: unpacked wheels in a folder of the user, none of them installed.

``$OMNISIM_HOME``, or what the platform calls a user's cache folder, has ``subjects/vllm-omni-V/`` for each: what is in
the wheel, and ``omnisim-wheel.json``, which says where it comes from. Only ``install`` asks the index.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from omnisim.errors import FileError, OmnisimError, SetupError, UsageError
from omnisim.subjects.wheel import Wheel

__all__ = ["RELEASES", "Release", "folder", "home", "install", "installed", "remove"]

RELEASES: Final = ("0.20.0", "0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0")
"""The releases that were tried, the oldest first; 0.20.0 is the first with a cache of rows."""

_PROJECT = "vllm-omni"
_MANIFEST = "omnisim-wheel.json"


class Release(msgspec.Struct, frozen=True):
    """What was fetched: a wheel, its SHA-256, and whether the index vouched for it or it came as a file."""

    version: str
    wheel: str
    sha256: str
    origin: Literal["index", "file"]
    num_files: int
    num_bytes: int

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return _folder(self.version)


class _Told(msgspec.Struct):
    """What pip's report says of the wheel that it would install.

    https://pip.pypa.io/en/stable/reference/installation-report/
    """

    class Install(msgspec.Struct):
        class Download(msgspec.Struct):
            class Archive(msgspec.Struct):
                hashes: dict[str, str] = {}

            url: str
            archive_info: Archive

        download_info: Download

    install: list[Install]


def home() -> Path:
    """``$OMNISIM_HOME``, else omnisim's folder in the user's cache, as ``~/.cache/omnisim``."""
    from platformdirs import user_cache_path

    told = os.environ.get("OMNISIM_HOME")
    return Path(told).expanduser().absolute() if told else user_cache_path("omnisim")


def folder(version: str) -> Path:
    """Where a release is unpacked. UsageError for a version not known, SetupError for one that is not fetched."""
    version = _checked(version)
    if _read(_folder(version)) is None:
        if version not in RELEASES:
            raise UsageError(f"unknown release {_PROJECT}:{version}", _known("or fetch this one"))
        raise SetupError(f"{_PROJECT}:{version} is not here yet", f"omnisim subjects install {version}")
    return _folder(version)


def installed() -> list[Release]:
    """What is here, the oldest first."""
    found = map(_read, (home() / "subjects").glob(f"{_PROJECT}-*"))
    return sorted((release for release in found if release is not None), key=lambda release: Version(release.version))


def install(what: str) -> Release:
    """Fetch a version from the index if it is not here yet, or unpack a wheel, in place of what is here.

    The wheel must have the hash that the index tells, and every file in it the hash that its RECORD tells. UsageError
    for a version that is not to be had or has no cache of rows, FileError for a broken wheel or one of another
    project, SetupError where the index does not answer or nothing can be written.
    """
    is_file = what.endswith(".whl")
    if not is_file and (there := _read(_folder(_checked(what)))) is not None:
        return there
    shelf = home() / "subjects"
    with _writing(shelf):
        shelf.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=shelf) as scratch:
            if is_file:
                return _unpack(Path(what), "file", Path(scratch))
            return _unpack(_fetch(_checked(what), Path(scratch)), "index", Path(scratch))


def remove(version: str) -> None:
    """Delete a release that was fetched; UsageError if it was not."""
    version = _checked(version)
    if not _folder(version).is_dir():
        there = ", ".join(release.version for release in installed())
        raise UsageError(f"{_PROJECT}:{version} is not here", f"here is {there}" if there else "nothing is")
    with _writing(home()):
        shutil.rmtree(_folder(version))


def _folder(version: str) -> Path:
    return home() / "subjects" / f"{_PROJECT}-{version}"


def _read(there: Path) -> Release | None:
    try:
        return msgspec.json.decode((there / _MANIFEST).read_bytes(), type=Release)
    except (OSError, msgspec.DecodeError):
        return None


def _checked(version: str) -> str:
    try:
        wanted = Version(version.removeprefix(f"{_PROJECT}:"))
    except InvalidVersion:
        raise UsageError(f"{version!r} is not a version", _known()) from None
    return next((release for release in RELEASES if Version(release) == wanted), str(wanted))  # 0.28 is 0.28.0


def _known(more: str = "") -> str:
    return f"known: {', '.join(RELEASES)}{f'; {more}: omnisim subjects install' if more else ''}"


@contextmanager
def _writing(there: Path) -> Iterator[None]:
    """A folder that cannot be written to, or a full disk, is said in a line."""
    try:
        yield
    except OSError as error:
        raise SetupError(f"{there}: {error.strerror or error}", "free or make writable, or set OMNISIM_HOME") from None


def _fetch(version: str, scratch: Path) -> Path:
    """Download a wheel; SetupError if it is not the one whose hash the index tells."""
    wanted = f"{_PROJECT}=={version}"
    report = _pip(version, "install", "--dry-run", "--ignore-installed", "--report", "-", wanted)
    told = msgspec.json.decode(report, type=_Told).install[0].download_info
    if "sha256" not in told.archive_info.hashes:
        raise SetupError(f"the index tells no hash of {wanted}", "omnisim subjects install FILE.whl, if you trust it")
    _pip(version, "download", "--dest", str(scratch), wanted)
    (wheel,) = scratch.glob("*.whl")
    if _sha256(wheel) != told.archive_info.hashes["sha256"]:
        raise SetupError(f"{wheel.name} is not what the index tells: its hash is another", "try again")
    return wheel


def _pip(version: str, command: str, *words: str) -> bytes:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:")
    done = subprocess.run([sys.executable, "-m", "pip", command, *quiet, *words], capture_output=True, check=False)
    if done.returncode == 0:
        return done.stdout
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()] or ["nothing"]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    versions = re.search(r"\(from versions: (.*?)\)", "\n".join(errors))
    if versions is not None and versions[1] not in ("", "none"):
        raise UsageError(f"the index has no wheel of {_PROJECT} {version}", _known())
    if versions is not None:
        raise SetupError(f"the index does not answer, or has no {_PROJECT}", "see to the network, or give a .whl file")
    if "No module named pip" in said[-1]:
        raise SetupError("there is no pip in this environment, and wheels come by it", "python -m ensurepip")
    if f"[Errno {errno.ENOSPC}]" in done.stderr.decode(errors="replace"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise SetupError(f"pip {command} failed: {(errors or said)[-1]}", "see to it, or give a .whl file")


def _unpack(wheel: Path, origin: Literal["index", "file"], scratch: Path) -> Release:
    """Check a wheel, and put what is in it in place."""
    version, new = _version(wheel), scratch / "new"
    try:
        with zipfile.ZipFile(wheel) as archive:
            _check_record(archive)
            archive.extractall(new)
    except FileNotFoundError:
        raise FileError(str(wheel), "there is no such file", "name a wheel") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise FileError(str(wheel), f"not a wheel, or a damaged one: {error}", "fetch it again") from None
    try:
        Wheel(new, f"{_PROJECT}:{version}")
    except OmnisimError as error:
        raise UsageError(f"{wheel.name}: {error.what.partition(': ')[2]}", error.remedy) from None
    files = [file for file in new.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    release = Release(version, wheel.name, _sha256(wheel), origin, len(files), size)
    (new / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(release)))
    if release.folder.exists():
        release.folder.rename(scratch / "old")
    new.rename(release.folder)
    return release


def _version(wheel: Path) -> str:
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise FileError(str(wheel), f"not the name of a wheel: {error}", "name it as the index does") from None
    if name != canonicalize_name(_PROJECT):
        raise FileError(str(wheel), f"this is {name}, not {_PROJECT}", f"name a wheel of {_PROJECT}")
    return str(version)


def _check_record(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile unless RECORD tells the files that are there, and their hashes."""
    from installer.exceptions import InvalidWheelSource
    from installer.sources import WheelFile

    try:
        WheelFile(archive).validate_record()
    except WheelFile.validation_error as error:
        raise zipfile.BadZipFile(error.issues[0].removeprefix(f"In {archive.filename}, ")) from None
    except (InvalidWheelSource, KeyError, UnicodeDecodeError) as error:
        raise zipfile.BadZipFile(str(error)) from None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
