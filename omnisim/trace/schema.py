"""JSON Schemas of what people and captures write; ``python -m omnisim.trace.schema`` writes them anew."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from omnisim.talker import Talker
from omnisim.trace.model import Header, StepRecord
from omnisim.trace.yamlform import YamlTrace

__all__ = ["FOLDER", "as_file", "schema_of", "schemas", "write_schemas"]

FOLDER = Path(str(files("omnisim.trace"))) / "schemas"

_TITLES: dict[str, tuple[type, str]] = {
    "trace": (YamlTrace, "An omnisim trace in YAML"),
    "trace-header": (Header, "The first line of an omnisim trace in JSON Lines"),
    "trace-step": (StepRecord, "Each further line of an omnisim trace in JSON Lines"),
    "talker": (Talker, "An omnisim talker"),
}


def schemas() -> dict[str, dict[str, Any]]:
    """File name and schema (2020-12) of each form."""
    return {f"{name}.schema.json": schema_of(kind, title) for name, (kind, title) in _TITLES.items()}


def schema_of(kind: type, title: str) -> dict[str, Any]:
    """The schema of a type that is read strictly."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind), "title": title}
    if kind is YamlTrace:
        schema["$defs"]["YamlTrace"]["oneOf"] = [{"required": ["steps"]}, {"required": ["story"]}]
    return schema


def write_schemas(folder: Path = FOLDER) -> None:
    """Write each schema into ``folder``."""
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_bytes(as_file(schema))


def as_file(schema: dict[str, Any]) -> bytes:
    """A schema as it is committed."""
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


if __name__ == "__main__":
    write_schemas()
