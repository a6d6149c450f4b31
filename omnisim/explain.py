"""A divergence told in words: whose row came, when it was written, and what happened to the slot before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from omnisim.rows.naming import Names
from omnisim.trace.model import Step
from omnisim.verdict import Divergence

__all__ = ["Evidence", "Write", "explain", "gather"]


@dataclass(frozen=True, slots=True)
class Write:
    """A row that the model computed: of which request and position, in which step."""

    req_id: str
    position: int
    step: int

    def __str__(self) -> str:
        return f"position {self.position} of {self.req_id}, written in step {self.step}"


@dataclass(slots=True)
class Evidence:
    """What the trace says about a divergence.

    ``owner`` is the write of the row that came: the last into a slot that the request reads, else the first of all
    (the same content may have been computed more than once). ``last_write`` is the last into the slot of the row that
    was due, ``last_name`` the name of that row. ``alive`` are the requests that were not over in that step.
    ``owner_reads`` says that the owner of the row that came had itself taken the block of that slot from the cache.
    """

    owner: Write | None = None
    last_write: Write | None = None
    last_name: int | None = None
    alive: set[str] = field(default_factory=set)
    owner_reads: bool = False


def gather(steps: Iterable[Step], names: Names, divergence: Divergence, block_size: int) -> Evidence:
    """Read the trace again, up to the step of the divergence; ``names`` must be fresh."""
    evidence = Evidence()
    hit_blocks: dict[str, tuple[int, ...]] = {}
    for step in steps:
        names_T = names.advance(step)
        hit_blocks.update(_hit_blocks(step, block_size))
        evidence.alive.difference_update(step.finished_req_ids)
        evidence.alive.update(step.req_ids)
        if divergence.found is not None:
            for token in np.flatnonzero(names_T == np.uint64(divergence.found)):
                if evidence.owner is None or int(step.slot_mapping[token]) in divergence.slots:
                    evidence.owner = _write(step, int(token))
        if divergence.slot is not None:
            for token in np.flatnonzero(step.slot_mapping == divergence.slot):
                evidence.last_write, evidence.last_name = _write(step, int(token)), int(names_T[token])
        if step.index >= divergence.step:
            break
    if evidence.owner is not None and divergence.slot is not None and evidence.owner.req_id != divergence.req_id:
        evidence.owner_reads = divergence.slot // block_size in hit_blocks.get(evidence.owner.req_id, ())
    return evidence


def _hit_blocks(step: Step, block_size: int) -> dict[str, tuple[int, ...]]:
    """Blocks that requests of this step take from the prefix cache."""
    entering = {new.req_id for new in step.scheduled_new_reqs}.union(step.resumed_req_ids)
    rows = zip(step.req_ids, step.num_computed_tokens, step.block_table, strict=True)
    return {req_id: blocks[: -(-computed // block_size)] for req_id, computed, blocks in rows if req_id in entering}


def _write(step: Step, token: int) -> Write:
    row = int(np.searchsorted(step.query_start_loc, token, side="right")) - 1
    position = step.num_computed_tokens[row] + token - step.query_start_loc[row]
    return Write(step.req_ids[row], position, step.index)


def explain(divergence: Divergence, evidence: Evidence) -> str:
    """One sentence (or two) of cause, as far as the evidence goes."""
    return " ".join(filter(None, (_what_came(divergence, evidence), _what_should_be_there(divergence, evidence))))


def _what_came(divergence: Divergence, evidence: Evidence) -> str:
    owner = evidence.owner
    reader = " by a reader of the shared block" if evidence.owner_reads else ""
    match divergence.check:
        case "isolation":
            if evidence.last_name is not None and evidence.last_name == divergence.found:
                return f"The schedule itself hits another content: {owner}, is what the slot holds."
            return (
                f"The row is of another content: {owner}{reader}."
                if owner
                else "The row is of no content in this trace."
            )
        case "keys" if divergence.came == "nothing":
            return "Nothing was handed out for this key and request."
        case "never-written":
            return "The row was never written: it is what fresh storage holds."
        case "padding":
            return "The row is padding: the subject took rows past the tokens that were scheduled."
        case "absent-rows":
            return "The key was not emitted when these positions were computed, so there are no rows to serve."
        case "row-count" if divergence.position is not None and divergence.came.startswith("nothing"):
            if divergence.position < divergence.num_cached:
                return f"The request entered with {divergence.num_cached} cached positions; not all of their rows came."
            return "Not all rows that the step computed for the request came."
        case "aliasing":
            return "The output is a view of a buffer that was written to later."
    if owner is None:
        return ""
    whose = "its own" if owner.req_id == divergence.req_id else f"{owner.req_id}'s"
    shift = 0 if divergence.position is None else owner.position - divergence.position
    shifted = f": shifted by {shift:+d}" if shift else ""
    return f"It holds {whose} row of position {owner.position}, written in step {owner.step}{reader}{shifted}."


def _what_should_be_there(divergence: Divergence, evidence: Evidence) -> str:
    if divergence.position is None or divergence.position >= divergence.num_cached:
        return ""
    last = evidence.last_write
    if last is None:
        return f"Nobody computed slot {divergence.slot} in this trace: its rows cannot be known."
    still = ", which is still running" if last.req_id in evidence.alive else ""
    whose = f"position {last.position} of {last.req_id}{still}"
    return f"Slot {divergence.slot} was last computed in step {last.step}: {whose}."
