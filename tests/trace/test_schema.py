"""The committed schemas are those of the model, and accept what the reader accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from omnisim.trace import load
from omnisim.trace.model import encode_json
from omnisim.trace.schema import FOLDER, as_file, schemas
from omnisim.trace.yamlform import parse
from tests.trace.schedules import header, schedule

TRACES = Path(__file__).parents[2] / "traces"


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((FOLDER / f"{name}.schema.json").read_bytes()))


def test_the_committed_schemas_are_generated() -> None:
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == {
        name: as_file(schema) for name, schema in schemas().items()
    }, "run python -m omnisim.trace.schema"


@pytest.mark.parametrize("name", sorted(schemas()))
def test_each_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schemas()[name])


def test_lines_are_valid() -> None:
    validator("trace-header").validate(json.loads(encode_json(header())))
    for record in schedule(3, 30):
        validator("trace-step").validate(json.loads(encode_json(record)))


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.yaml")), ids=lambda path: path.name)
def test_committed_yaml_is_valid(path: Path) -> None:
    validator("trace").validate(parse(path).value)


def test_recorded_lines_are_valid() -> None:
    trace = load(TRACES / "recorded" / "chat-tight.jsonl.zst")
    validator("trace-header").validate(msgspec.to_builtins(trace.header))
    steps = validator("trace-step")
    for record in trace.records():
        steps.validate(json.loads(encode_json(record)))


@pytest.mark.parametrize(
    "change",
    [{"steps": []}, {"story": ""}, {"unknown": 1, "story": ""}, {"steps": [], "story": ""}, {}],
)
def test_the_schema_of_yaml_wants_steps_or_a_story(change: dict[str, Any]) -> None:
    value = {"format": "omnisim-trace/1", "producer": {"name": "x"}, "cache": {"num_blocks": 1, "block_size": 1}}
    assert validator("trace").is_valid(value | change) == (change in ({"steps": []}, {"story": ""}))
