"""JSON Schemas of scenarios and of what coverage requires; ``python -m omnisim.sim.schema`` writes them anew."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from omnisim.coverage import Required
from omnisim.sim.scenario import Scenario
from omnisim.trace.schema import as_file, schema_of

__all__ = ["FOLDER", "schemas", "write_schemas"]

FOLDER = Path(str(files("omnisim.sim"))) / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """File name and schema (2020-12) of each form."""
    return {
        "scenario.schema.json": schema_of(Scenario, "An omnisim scenario"),
        "coverage-require.schema.json": schema_of(Required, "States that omnisim coverage requires"),
    }


def write_schemas(folder: Path = FOLDER) -> None:
    """Write each schema into ``folder``."""
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_bytes(as_file(schema))


if __name__ == "__main__":
    write_schemas()
