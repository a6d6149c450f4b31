"""JSON Lines: a header, then one record a line, plain or in zstd; a stream in both directions."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import msgspec
import zstandard

from omnisim.errors import FileError
from omnisim.trace.model import FORMAT, Header, StepRecord, encode_json
from omnisim.trace.words import complaint

__all__ = ["read_header", "read_records", "write"]

MAX_LINE = 256 * 2**20
CHUNK = 2**18
ZSTD_CHUNK = 4 * 2**10
"""Compressed bytes taken at once: zstd can make at most some 128 MiB of so many."""

T = TypeVar("T", Header, StepRecord)

_HEADER = msgspec.json.Decoder(Header)
_RECORD = msgspec.json.Decoder(StepRecord)
_HEADER_REMEDY = f'the first line is {{"format":"{FORMAT}","producer":{{...}},"cache":{{...}}}}'


class _Cut(Exception):
    """The stream stops in the middle; what came before is good."""


class _Tail(bytes):
    """A last line without a newline."""


def read_header(path: Path) -> Header:
    """The first line; FileError for whatever it is that is not a header."""
    place = f"{path}:1"
    try:
        line = next(_lines(path), None)
        if not line or not line.strip():
            raise FileError(place, "the file is empty" if line is None else "there is no header", _HEADER_REMEDY)
        return _decode(_HEADER, line, place)
    except _Cut as cut:
        raise FileError(place, f"{cut} before the header ends", "nothing of it can be read") from None


def read_records(path: Path) -> Iterator[tuple[int, StepRecord]]:
    """Line number and record, one after another; FileError where the file stops being good."""
    good, last = 1, -1
    lines = _lines(path)
    try:
        next(lines, None)
        for line in lines:
            record = _decode(_RECORD, line, f"{path}:{good + 1}")
            good += 1
            last = last + 1 if record.step is None else record.step
            yield good, record
    except _Cut as cut:
        _refuse_cut(f"{path}:{good + 1}", str(cut), last)


def _refuse_cut(place: str, what: str, last: int) -> NoReturn:
    if last < 0:
        raise FileError(place, f"{what} before the first step ends", "no step of it can be read") from None
    raise FileError(place, f"{what}, good up to step {last}", f"read it with --steps :{last + 1}") from None


def _decode(decoder: msgspec.json.Decoder[T], line: bytes, place: str) -> T:
    try:
        value = decoder.decode(line)
    except msgspec.ValidationError as error:
        raise FileError(place, *complaint(error)) from None
    except RecursionError:
        raise FileError(place, "it is nested too deep", "no trace is") from None
    except msgspec.DecodeError as error:
        if isinstance(line, _Tail):
            raise _Cut("the line is cut") from None
        if line.startswith(codecs.BOM_UTF8):
            raise FileError(place, "it begins with a byte order mark", "save it as UTF-8 without one") from None
        what = "the line is empty" if not line.strip() else f"the line is not JSON ({error})"
        raise FileError(place, what, "a line is one JSON object") from None
    canonical = encode_json(value)
    if canonical != line and canonical.translate(None, b" ") != line.translate(None, b" \r"):
        json.loads(line, object_pairs_hook=lambda pairs: _no_duplicates(pairs, place))
    return value


def _no_duplicates(pairs: list[tuple[str, Any]], place: str) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise FileError(place, f"the key {twice!r} is there twice", "keep one of them")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their newline; _Cut where the zstd stream stops being good."""
    pieces: list[bytes] = []
    number = 1
    with path.open("rb") as file:
        for chunk in _unpacked(file) if path.suffix == ".zst" else iter(lambda: file.read(CHUNK), b""):
            first, *others = chunk.split(b"\n")
            pieces.append(first)
            if others:
                yield b"".join(pieces)
                yield from others[:-1]
                number += len(others)
                pieces = [others[-1]]
            if sum(map(len, pieces)) > MAX_LINE:
                raise FileError(f"{path}:{number}", f"the line is longer than {MAX_LINE} bytes", "a line is one step")
    if tail := b"".join(pieces):
        yield _Tail(tail)


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """What a file of zstd frames contains, piece by piece."""
    unpacker = zstandard.ZstdDecompressor()
    frame, at_start = unpacker.decompressobj(), True
    while data := file.read(ZSTD_CHUNK):
        while data:
            try:
                piece = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _Cut(
                    f"the zstd stream is damaged ({str(error).removeprefix('zstd decompress error: ')})"
                ) from None
            at_start = False
            if piece:
                yield piece
            data = b""
            if frame.eof:
                data, frame, at_start = frame.unused_data, unpacker.decompressobj(), True
    if not at_start:
        raise _Cut("the zstd stream is cut")


def write(file: IO[bytes], header: Header, records: Iterable[StepRecord], packed: bool) -> None:
    """Header and records, one a line, in zstd if ``packed``."""
    if packed:
        with zstandard.ZstdCompressor(level=9, write_checksum=True).stream_writer(file, closefd=False) as stream:
            _write_lines(stream, header, records)
    else:
        _write_lines(file, header, records)


def _write_lines(stream: Any, header: Header, records: Iterable[StepRecord]) -> None:
    stream.write(encode_json(header) + b"\n")
    for record in records:
        stream.write(encode_json(record) + b"\n")
