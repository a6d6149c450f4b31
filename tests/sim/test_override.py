"""--set and --sweep: a scenario changed from the command line is checked as a file is."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim.errors import FileError, UsageError
from omnisim.sim.override import Change, changed, parse_set, parse_sweep, variants
from omnisim.sim.scenario import Scenario, read_scenario, scenario_names

TEXT = """\
format: omnisim-scenario/1
name: mine
summary: A test.
engine: {block_size: 8}
traffic:
  - {name: a, prompt: [{tokens: 3}]}
  - {name: b, count: 2, prompt: [{tokens: 3}, {share: s, tokens: {uniform: [1, 9]}}]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def with_sets(path: Path, *sets: str) -> Scenario:
    place, node = read_scenario(str(path))
    return changed(node, place, [parse_set(text) for text in sets])


def test_a_field_is_set_where_it_stands_and_where_it_was_left_out(path: Path) -> None:
    made = with_sets(path, "engine.block_size=32", "engine.policy=priority", "seed=7", "step_time.base=2.5")
    assert (made.engine.block_size, made.engine.policy, made.seed) == (32, "priority", 7)
    assert made.step_time is not None
    assert made.step_time.base == 2.5


def test_groups_and_segments_go_by_number_or_name(path: Path) -> None:
    made = with_sets(path, "traffic.b.count=5", "traffic.0.count=4", "traffic.b.prompt.1.tokens=11")
    assert [group.count for group in made.traffic] == [4, 5]
    assert made.traffic[1].prompt[1].tokens == 11


def test_a_value_may_be_anything_that_yaml_can_say_in_a_line(path: Path) -> None:
    made = with_sets(path, "traffic.a.output_tokens={choice: [1, 2]}", "events=[{at: 3, abort: [a-0]}]", "talker=tts")
    assert made.traffic[0].output_tokens.choice == (1, 2)  # type: ignore[union-attr]
    assert made.events[0].abort == ("a-0",)
    assert made.talker == "tts"


def test_a_later_change_wins(path: Path) -> None:
    assert with_sets(path, "engine.block_size=16", "engine.block_size=4").engine.block_size == 4


def test_the_file_is_as_it_was_afterwards(path: Path) -> None:
    place, node = read_scenario(str(path))
    changed(node, place, [parse_set("traffic.a.count=9")])
    assert changed(node, place, ()).traffic[0].count == 1


@pytest.mark.parametrize("value", [3, 2.5, True, None, "priority", "40", "a b", "true", "é: [", [1, "x"], {"at": 3}])
def test_a_change_is_told_as_it_can_be_given_again(value: object) -> None:
    assert parse_set(str(Change("--set", "a.b", value))).value == value


def test_sweeps_are_combined(path: Path) -> None:
    runs = list(variants([parse_sweep("engine.block_size=16,32"), parse_sweep("seed=1,2,3")]))
    assert [" ".join(map(str, run)) for run in runs] == [
        f"engine.block_size={size} seed={seed}" for size in (16, 32) for seed in (1, 2, 3)
    ]
    assert list(variants([])) == [()]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("engine.num_blocks", "--set 'engine.num_blocks' is no PATH=VALUE; for example --set engine.num_blocks=40"),
        ("=3", "--set '=3' is no PATH=VALUE; for example --set engine.num_blocks=40"),
        ("engine.num_blocks=-3", "--set engine.num_blocks=-3: engine.num_blocks: expected int >= 2"),
        (
            "engine.num_block=3",
            "--set engine.num_block=3: engine: object contains unknown field num_block; did you mean 'num_",
        ),
        ("num_blocks=3", "--set num_blocks=3: object contains unknown field num_blocks; it belongs in another place"),
        ("engine.num_blocks=", "--set 'engine.num_blocks=' is no PATH=VALUE"),
        (
            "engine.async_scheduling=yes",
            "--set engine.async_scheduling=yes: engine.async_scheduling: expected bool, got str; wr",
        ),
        ("engine.policy=best", "--set engine.policy=best: engine.policy: invalid enum value 'best'"),
        ("traffic.c.count=3", "--set traffic.c.count=3: traffic has no 'c'; it has a, b"),
        ("traffic.2.count=3", "--set traffic.2.count=3: traffic has no '2'; it has a, b"),
        (
            "traffic.b.prompt.7.tokens=1",
            "--set traffic.b.prompt.7.tokens=1: traffic.1.prompt has no '7'; it has 0 to 1",
        ),
        ("name.x=1", "--set name.x=1: name has no fields; end the path there"),
        ("seed=&a 1", "--set seed=&a 1: 'a' is an anchor or an alias; write the value out"),
        ("seed={a: 1", "--set seed={a: 1: '{a: 1' is not YAML; put it in quotes, and mind the shell"),
        ("traffic.b.turns=0.5", "--set traffic.b.turns=0.5: traffic[1].turns: expected int | object, got float"),
    ],
)
def test_a_change_that_does_not_fit_is_refused_by_its_own_words(path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as found:
        with_sets(path, text)
    assert str(found.value).startswith(complaint)


def test_of_several_changes_the_guilty_one_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--set engine\.num_blocks=x: engine\.num_blocks: expected int"):
        with_sets(path, "engine.block_size=16", "engine.num_blocks=x", "seed=1")


@pytest.mark.parametrize("text", ["engine.block_size", "engine.block_size=", "a b=1"])
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no PATH=VALUE,VALUE; for example --sweep"):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("line", "wrong", "complaint"),
    [
        (4, "engine: {block_size: 0}", ":4: engine.block_size: expected int >= 1"),
        (4, "engine: {blocksize: 8}", ":4: engine: object contains unknown field blocksize"),
        (6, "  - {name: a, prompt: []}", ":6: traffic[0]: prompt has no segment"),
        (6, "  - {name: b, prompt: [{tokens: 3}]}", ":1: two groups of traffic are called 'b'"),
        (6, "  - {name: a b, prompt: [{tokens: 3}]}", ":6: traffic[0].name: expected str matching regex"),
        (6, "  - {name: a, prompt: [{tokens: 3, branches: 2}]}", ":6: traffic[0].prompt[0]: branches are variants"),
        (6, "  - {name: a, prompt: [{tokens: 3}], turns: 2, n: 2}", ":6: traffic[0]: a conversation of several turns"),
        (
            6,
            "  - {name: a, prompt: [{tokens: 3}], abort: {}}",
            ":6: traffic[0].abort: an abort is after_",
        ),
        (6, "  - {name: a, prompt: [{tokens: -3}]}", ":6: traffic[0].prompt[0].tokens: expected int >= 0"),
        (1, "format: omnisim-scenario/2", ":1: format 'omnisim-scenario/2' is not known; this omnisim reads"),
        (1, "format: omnisim-trace/1", ":1: this is a trace; omnisim replay takes it"),
        (
            2,
            "name: mine\nevents: [{at: 3}]",
            ":3: events[0]: an event is one of abort, resubmit",
        ),
        (6, "  - {name: a, prompt: [{image: i, tokens: 0}]}", ":6: traffic[0].prompt[0]: an image has one placeholder"),
        (6, "  - {name: a, prompt: [{share: s, tokens: 3}]}", ":1: 's' is shared, and has other tokens or branches"),
        (4, "engine: {num_speculative_tokens: 2, async_scheduling: true}", ":4: engine: num_speculative_tokens under"),
        (2, "name: mine\nname: yours", ":3: the key 'name' is there twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_line(path: Path, line: int, wrong: str, complaint: str) -> None:
    lines = TEXT.splitlines()
    lines[line - 1] = wrong
    path.write_text("\n".join(lines))
    with pytest.raises(FileError) as found:
        with_sets(path)
    assert str(found.value).startswith(f"{path}{complaint}")


def test_scenarios_are_found_by_name() -> None:
    place, _ = read_scenario("multi-turn")
    assert Path(place).name == "multi-turn.yaml"
    with pytest.raises(UsageError, match="unknown scenario 'multiturn'; did you mean 'multi-turn'"):
        read_scenario("multiturn")
    with pytest.raises(FileError, match=r"nowhere\.yaml: it cannot be read"):
        read_scenario("nowhere.yaml")
    assert "multi-turn" in scenario_names()
