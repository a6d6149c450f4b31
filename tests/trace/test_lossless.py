"""What is written is read back, in any of the encodings, in little room and in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisim.talker import KeySpec, Talker
from omnisim.trace import Geometry, Header, Producer, RecordedRows, StepRecord, convert, load, save
from tests.trace.schedules import decode_steps, header, schedule

TALKER = Talker(
    format="omnisim-talker/1",
    name="all",
    hidden_size=8,
    keys={
        "codes.audio": KeySpec(kind="row", shape=(2, 3), dtype="int64", deferred=True),
        "meta": KeySpec(kind="nested", fields={"len": KeySpec(kind="list", shape=())}),
        "rate": KeySpec(kind="opaque", value=0.1),
        "odd": KeySpec(kind="opaque", value="1e5"),
    },
)
RICH = Header(
    format="omnisim-trace/1",
    producer=Producer(name="x: [", version="0x10"),
    cache=Geometry(num_blocks=64, block_size=4, kernel_block_size=4, num_kv_cache_groups=3),
    talker=TALKER,
    recorded_rows=RecordedRows(tensors="a.safetensors", no_cache_trace="b.jsonl", no_cache_tensors="b.safetensors"),
    expect={"builtin": "agreement", "none": "divergence", "no": "crash"},
    provenance="two\nlines, a tab\t, #, 'quotes' \" and é 😀\x00\x85",
)

CHAIN = ("a.jsonl", "b.jsonl.zst", "c.yaml", "d.yml", "e.jsonl")


@pytest.mark.parametrize("first", CHAIN)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 12), rich=st.booleans())
def test_a_trace_is_the_same_in_every_encoding(
    tmp_path: Path, first: str, seed: int, num_steps: int, rich: bool
) -> None:
    head, records = RICH if rich else header(), list(schedule(seed, num_steps))
    save(tmp_path / first, head, records, overwrite=True)
    source = tmp_path / first
    for name in CHAIN:
        if name != first:
            convert(source, tmp_path / name, overwrite=True)
            source = tmp_path / name
        trace = load(source)
        assert trace.header == head
        assert list(trace.records()) == records
        assert len(list(trace.steps())) == num_steps


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), name=st.text(min_size=1, max_size=10))
def test_any_text_survives_yaml(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    head = Header(
        format="omnisim-trace/1",
        producer=Producer(name=name),
        cache=Geometry(num_blocks=1, block_size=1),
        expect={name: "agreement"},
        provenance=text,
    )
    path = tmp_path_factory.mktemp("text") / "t.yaml"
    save(path, head, [])
    assert load(path).header == head


def test_the_two_json_encodings_are_byte_for_byte_stable(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", header(), schedule(1, 20))
    convert(tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst")
    convert(tmp_path / "b.jsonl.zst", tmp_path / "c.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()


def test_schedules_by_chance_cover_what_can_happen() -> None:
    records = [record for seed in range(5) for record in schedule(seed, 30)]
    told_by_chance = set(StepRecord.__struct_fields__) - {"scheduled_spec_decode_tokens"}
    for field in told_by_chance:
        assert any(getattr(record, field) for record in records), field


def test_a_decode_step_of_64_requests_takes_at_most_a_kilobyte(tmp_path: Path) -> None:
    head = Header(
        format="omnisim-trace/1", producer=Producer(name="x"), cache=Geometry(num_blocks=100_000, block_size=16)
    )
    save(tmp_path / "t.jsonl.zst", head, decode_steps(1000, 64))
    assert (tmp_path / "t.jsonl.zst").stat().st_size <= 1000 * 1024


def test_a_block_id_takes_at_most_eight_bytes(tmp_path: Path) -> None:
    head = Header(
        format="omnisim-trace/1", producer=Producer(name="x"), cache=Geometry(num_blocks=100_000, block_size=16)
    )
    sizes, num_blocks = [], 0
    for name, keep in (("with", True), ("without", False)):
        records = list(decode_steps(1000, 64))
        if keep:
            num_blocks = sum(len(ids) for record in records for ids in record.new_block_ids.values())
        else:
            records = [type(record)(**_fields(record, drop="new_block_ids")) for record in records]
        save(tmp_path / f"{name}.jsonl.zst", head, records)
        sizes.append((tmp_path / f"{name}.jsonl.zst").stat().st_size)
    assert num_blocks > 3000
    assert sizes[0] - sizes[1] <= 8 * num_blocks


def _fields(record: object, drop: str) -> dict[str, object]:
    names = record.__struct_fields__  # type: ignore[attr-defined]
    return {name: getattr(record, name) for name in names if name != drop}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_long_file_is_read_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    head = Header(
        format="omnisim-trace/1", producer=Producer(name="x"), cache=Geometry(num_blocks=100_000, block_size=16)
    )
    path = tmp_path / f"t{suffix}"
    save(path, head, decode_steps(50_000, 2))
    tracemalloc.start()
    try:
        num_steps = sum(1 for _ in load(path).steps())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_steps == 50_000
    assert peak < 8 * 2**20
