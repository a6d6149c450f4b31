"""Text into token ids: by a tokenizer that lies on this machine, or made up from the text's bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnisim.errors import FileError, SetupError
from omnisim.importers.identity import Kind, identities
from omnisim.importers.options import ReadOptions
from omnisim.workload import TokenIds, pseudo_tokens

__all__ = ["BYTES_PER_TOKEN", "Encoder", "encoder"]

BYTES_PER_TOKEN = 4
_PSEUDO = (
    f"There is no tokenizer: {BYTES_PER_TOKEN} UTF-8 bytes of text are a token, with a made-up id. "
    "Equal beginnings of texts have equal tokens; their number is not that of a model."
)
_REAL = "Tokens are those of {}, without a chat template: the text itself and no special tokens."


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tokens of a text, and the sentence that says how they came about."""

    encode: Callable[[str], TokenIds]
    note: str


def encoder(options: ReadOptions) -> Encoder:
    """The encoder that is asked for; FileError for a tokenizer that cannot be read, SetupError without the library."""
    if options.tokenizer is None:
        return Encoder(lambda text: _stretched(_pseudo_encode(text), options), _PSEUDO)
    path = _tokenizer_file(Path(options.tokenizer))
    encode = _tokenizer_encode(path)
    return Encoder(lambda text: _stretched(encode(text), options), _REAL.format(path))


def _pseudo_encode(text: str) -> TokenIds:
    """A token for each four bytes; the last may be of fewer."""
    raw = text.encode()
    whole, rest = divmod(len(raw), BYTES_PER_TOKEN)
    quads = np.frombuffer(raw, dtype="<u4", count=whole).astype(np.int64)
    names = [identities(Kind.TEXT, quads, BYTES_PER_TOKEN)]
    if rest:
        tail = np.array([int.from_bytes(raw[-rest:], "little")], dtype=np.int64)
        names.append(identities(Kind.TEXT, tail, rest))
    return pseudo_tokens(np.concatenate(names), np.zeros(1, dtype=np.uint64))


def _stretched(tokens: TokenIds, options: ReadOptions) -> TokenIds:
    """Tokens repeated or left out evenly, from the front: equal beginnings stay so."""
    if not len(tokens):
        return tokens
    sources = np.arange(options.scaled(len(tokens))) / options.scale_lengths
    kept: TokenIds = tokens[np.minimum(sources.astype(np.int64), len(tokens) - 1)]
    return kept


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileError(str(file), "there is no such file", "name a tokenizer.json, or a folder with one")
    return file


def _tokenizer_encode(path: Path) -> Callable[[str], TokenIds]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SetupError("the library tokenizers is not here", "pip install tokenizers, or name no tokenizer") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no other class
        first = str(error).partition("\n")[0]
        raise FileError(str(path), f"it is no tokenizer ({first})", "name a tokenizer.json of tokenizers") from error
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
