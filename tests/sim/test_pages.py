"""docs/scenarios.md and the schemas leave nothing out, and their examples work."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest

from omnisim.coverage import STATES, Coverage, cover, read_required
from omnisim.importers import WORKLOAD_FORMATS
from omnisim.sim.override import changed
from omnisim.sim.run import plan_of, prepare
from omnisim.sim.scenario import EngineSpec, Event, Group, Scenario, read_scenario, scenario_names
from omnisim.sim.schema import FOLDER, schemas
from omnisim.trace.schema import as_file

from .simulated import drive, named

PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
SCENARIO, REQUIRED = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def first_column(heading: str) -> set[str]:
    """Names in the first column of the table with this heading."""
    table = PAGE[PAGE.index(f"| {heading} |") :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}


def test_the_tables_have_every_field_and_format() -> None:
    assert first_column("scenario field") == set(Scenario.__struct_fields__)
    assert first_column("engine field") == set(EngineSpec.__struct_fields__)
    assert first_column("traffic field") == set(Group.__struct_fields__)
    assert first_column("event field") == set(Event.__struct_fields__)
    assert first_column("format") == set(WORKLOAD_FORMATS)


@pytest.mark.parametrize("form", WORKLOAD_FORMATS)
def test_the_page_shows_a_row_of_each_format_as_its_reader_tells_it(form: str) -> None:
    told = import_module(f"omnisim.importers.{form.replace('-', '_')}")._FORMAT.example
    assert told.replace(" and then ", "\n    ") in PAGE


@pytest.mark.usefixtures("vllm")
def test_the_scenario_of_the_page_runs_and_reaches_what_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO)
    scenario = changed(read_scenario(str(path))[1], str(path), ())
    made = drive(prepare(scenario.engine, plan_of(scenario, scenario.seed), str(path), told=""), "mine")
    assert (made.outcome.requests, made.stats.aborts) == (8, 1)
    assert made.outcome.requests_hit > 4
    assert made.stats.evictions > 0


@pytest.mark.usefixtures("vllm")
def test_the_library_reaches_every_state_but_those_that_the_page_names(tmp_path: Path) -> None:
    reached = sum((cover(named(name).trace) for name in scenario_names()), Coverage())
    never = first_column("state")
    assert never < set(STATES)
    assert {state for state in STATES if not reached.times(state)} == never
    path = tmp_path / "required.yaml"
    path.write_text(REQUIRED)
    assert reached.short_of(read_required(path)) == []


def test_the_committed_schemas_are_generated() -> None:
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == {
        name: as_file(schema) for name, schema in schemas().items()
    }, "run python -m omnisim.sim.schema"


@pytest.mark.parametrize("name", scenario_names())
def test_the_schema_accepts_each_scenario_and_not_another_field(name: str) -> None:
    schema = json.loads((FOLDER / "scenario.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    value = read_scenario(name)[1].value
    validator.validate(value)
    assert not validator.is_valid(value | {"engines": {}})
    assert not validator.is_valid(value | {"engine": {"num_blocks": 1}})
