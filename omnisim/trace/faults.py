"""The words of a refusal: each function looks for one kind of contradiction and says where it is, or that it is not.

None of this runs in a step whose lists agree, but for the checks of what enters or changes in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from omnisim.trace.model import Geometry, NewRequest, StepRecord

if TYPE_CHECKING:
    from omnisim.trace.expand import Request, Runs

Fault = tuple[str, str]
"""What is wrong, and the remedy."""

PAD = -1


def geometry(cache: Geometry) -> Fault | None:
    """A kernel block size that does not divide the block size."""
    kernel = cache.kernel_block_size
    if kernel is None or cache.block_size % kernel == 0:
        return None
    return (
        f"kernel_block_size {kernel} does not divide block_size {cache.block_size}",
        "a block is split into whole kernel blocks",
    )


def lengths(record: StepRecord, num_requests: int) -> Fault:
    """Lists that must be as long as the batch."""
    for field in ("num_computed_tokens", "num_scheduled_tokens", "new_token_ids"):
        found = len(getattr(record, field))
        if found != num_requests:
            break
    return f"{field} has {found} entries for {num_requests} requests", "one entry a request, in the order of req_ids"


def unknown(req_id: str, field: str) -> Fault:
    """A request that is not there ends, is preempted or is resumed."""
    return (
        f"request {req_id}: it is in {field} and not alive",
        "it must first be in scheduled_new_reqs, and not have finished since",
    )


def admission(new: NewRequest, alive: bool, tells: bool) -> Fault | None:
    """A new request that is there already, or whose prompt contradicts itself."""
    who, given, stated = f"request {new.req_id}: ", len(new.prompt_token_ids), new.num_prompt_tokens
    if alive and not new.replace:
        return who + "it is new while it is still alive", "finish it first, or say replace: true"
    if new.replace and not alive:
        return who + "it replaces a request that is not alive", "leave replace out"
    if given and not tells:
        return who + f"it has {given} prompt_token_ids at content level none", "give num_prompt_tokens only"
    if given and stated is not None and given != stated:
        return who + f"num_prompt_tokens is {stated} and {given} prompt_token_ids are given", "make them agree"
    return None


def membership(record: StepRecord, req_ids: Sequence[str], entering: Collection[str]) -> Fault | None:
    """A request that is twice in the batch, or enters and is not in it."""
    if len(set(req_ids)) != len(req_ids):
        twice = next(req_id for at, req_id in enumerate(req_ids) if req_id in req_ids[:at])
        return f"request {twice}: it is twice in req_ids", "a request is in a batch once"
    missing = sorted(set(entering) - set(req_ids))
    if missing:
        field = "resumed_req_ids" if missing[0] in record.resumed_req_ids else "scheduled_new_reqs"
        return f"request {missing[0]}: it is in {field} and not in req_ids", "add it to the batch, or enter it later"
    new = [new.req_id for new in record.scheduled_new_reqs]
    both = set(new) & set(record.resumed_req_ids)
    if both:
        return f"request {min(both)}: it is both new and resumed", "it is one of the two"
    if len(set(new)) != len(new):
        twice = next(req_id for at, req_id in enumerate(new) if req_id in new[:at])
        return f"request {twice}: it is twice in scheduled_new_reqs", "a request is new once"
    return None


def never_new(req_ids: Sequence[str], requests: Collection[str], finished: Collection[str]) -> Fault:
    """A scheduled request that is not alive."""
    req_id = next(req_id for req_id in req_ids if req_id not in requests)
    if req_id in finished:
        return f"request {req_id}: it is scheduled in the step in which it finished", "take it out of req_ids"
    return (
        f"request {req_id}: it is scheduled and not alive",
        "it must first be in scheduled_new_reqs, and not have finished since",
    )


def preempted(req_id: str) -> Fault:
    """A preempted request that runs on as if nothing had been."""
    return f"request {req_id}: it was preempted and is scheduled", "add it to resumed_req_ids"


def resumed_without_blocks(record: StepRecord) -> Fault | None:
    """A resumed request without a new row of blocks."""
    for req_id in record.resumed_req_ids:
        if req_id not in record.block_ids and req_id not in record.new_block_ids:
            return f"request {req_id}: it is resumed without blocks", "give its whole new row in block_ids"
    return None


def block_rows(record: StepRecord, req_ids: Collection[str], num_blocks: int) -> Fault | None:
    """A changed row whose request is not scheduled, is told twice, or has a block that does not exist."""
    rows = [*record.block_ids.items(), *record.new_block_ids.items()]
    for field, changed in (("block_ids", record.block_ids), ("new_block_ids", record.new_block_ids)):
        for req_id in changed:
            if req_id not in req_ids:
                return f"request {req_id}: it is in {field} and not in req_ids", "rows change where they are scheduled"
    both = sorted(record.block_ids.keys() & record.new_block_ids.keys())
    if both:
        return f"request {both[0]}: it is in block_ids and in new_block_ids", "replace its row or append to it"
    for req_id, blocks in rows:
        if blocks and max(blocks) >= num_blocks:
            return f"request {req_id}: block {max(blocks)} is not one of {num_blocks}", "see cache.num_blocks"
    return None


def continuity(req_id: str, start: int, expected: int, num_drafts: int) -> Fault:
    """Computed tokens that do not go on where the request stopped."""
    span = f"{expected - num_drafts} to {expected}" if num_drafts else f"{expected}"
    return (
        f"request {req_id}: num_computed_tokens is {start} where {span} were computed",
        "only a new or resumed request may start elsewhere",
    )


def query_start_loc(recorded: Sequence[int], derived: Sequence[int]) -> Fault:
    """A recorded query_start_loc that the counts contradict."""
    if len(recorded) != len(derived):
        return (
            f"query_start_loc has {len(recorded)} entries for {len(derived) - 1} requests",
            "one more than requests; leave it out and it is derived",
        )
    at = next(at for at, (found, want) in enumerate(zip(recorded, derived, strict=True)) if found != want)
    return (
        f"query_start_loc[{at}] is {recorded[at]} where num_scheduled_tokens add up to {derived[at]}",
        "leave it out and it is derived",
    )


def uncovered(req_ids: Sequence[str], record: StepRecord, rows: Sequence[Sequence[int]], block_size: int) -> Fault:
    """A span past its blocks."""
    counts = zip(req_ids, record.num_computed_tokens, record.num_scheduled_tokens, rows, strict=True)
    for req_id, start, count, blocks in counts:
        covered = len(blocks) * block_size
        if start + count > covered:
            break
    return (
        f"request {req_id}: positions {start} to {start + count - 1} reach past the {covered} that its {len(blocks)} "
        f"blocks cover",
        "give the missing blocks in new_block_ids",
    )


def slot_count(found: int, num_tokens: int, padded: int) -> Fault:
    """A slot_mapping of another length."""
    want = f"{num_tokens}" if padded == num_tokens else f"{num_tokens} or, padded, {padded}"
    return f"slot_mapping has {found} slots where {want} are due", "leave it out and it is derived"


def runs(recorded: Runs) -> Fault | None:
    """A run of no slots."""
    for run in recorded:
        if not isinstance(run, int) and run[1] < 1:
            return (
                f"slot_mapping has a run {list(run)}",
                "a run is [first slot, number of slots], the number at least 1",
            )
    return None


def _owner(at: int, starts: Sequence[int]) -> int:
    return next(row for row, start in enumerate(starts[1:]) if at < start)


def slots(
    found: Sequence[int], derived: Sequence[int], starts: Sequence[int], record: StepRecord, req_ids: Sequence[str]
) -> Fault | None:
    """A recorded slot that the block table contradicts; a pad slot (not stored) contradicts nothing."""
    for at, (slot, want) in enumerate(zip(found, derived, strict=True)):
        if slot not in (PAD, want):
            row = _owner(at, starts)
            position = record.num_computed_tokens[row] + at - starts[row]
            return (
                f"request {req_ids[row]}: slot_mapping has {slot} for position {position} where its blocks give {want}",
                "one of the two was recorded in another step",
            )
    return None


def padding(runs: Runs, num_tokens: int) -> Fault | None:
    """A slot behind the scheduled tokens that is not a pad."""
    at = 0
    for run in runs:
        first, count = (run, 1) if isinstance(run, int) else run
        at += count
        if at > num_tokens and first != PAD:
            return (
                f"slot_mapping has a slot (run from {first}) behind the {num_tokens} scheduled tokens",
                "padding is -1 there",
            )
    return None


def overlap(slots: Sequence[int], starts: Sequence[int], req_ids: Sequence[str]) -> Fault | None:
    """Two tokens that are written to one slot."""
    writers: dict[int, int] = {}
    for at, slot in enumerate(slots):
        if slot == PAD:
            continue
        if slot in writers:
            first, second = req_ids[_owner(writers[slot], starts)], req_ids[_owner(at, starts)]
            return f"requests {first} and {second} both write slot {slot}", "their blocks to write must differ"
        writers[slot] = at
    return None


def ids_at_level_none(record: StepRecord) -> Fault | None:
    """Token ids where the header promises that there are none."""
    if any(record.new_token_ids):
        return "new_token_ids has ids at content level none", "leave them out, or state another content level"
    return None


def untold(record: StepRecord, told: Sequence[Sequence[int]], batch: Sequence[Request]) -> Fault:
    """A request whose told token ids do not fit its untold positions."""
    for request, ids, start, count in zip(
        batch, told, record.num_computed_tokens, record.num_scheduled_tokens, strict=True
    ):
        want = max(0, start + count - request.known)
        if len(ids) != want:
            break
    if len(ids) < want:
        return (
            f"request {request.req_id}: position {request.known} is scheduled and its token id is not known",
            "give it in new_token_ids, or state content: none",
        )
    return (
        f"request {request.req_id}: {len(ids)} new_token_ids where {want} of its scheduled positions are untold",
        "ids that the prompt or an earlier step told are not told again",
    )


def unknown_prefix(record: StepRecord, batch: Sequence[Request]) -> Fault | None:
    """A request that enters behind token ids nobody told."""
    for request, start in zip(batch, record.num_computed_tokens, strict=True):
        if start > request.known:
            return (
                f"request {request.req_id}: it starts at {start} and only {request.known} of its token ids are known",
                "give them in prompt_token_ids, or state content: none",
            )
    return None


def drafts(record: StepRecord, req_ids: Sequence[str], tells: bool) -> Fault | None:
    """Drafts of a request that is not scheduled, more than are scheduled, or other than the ids that are told."""
    field = "scheduled_spec_decode_tokens"
    for req_id, ids in record.scheduled_spec_decode_tokens.items():
        who = f"request {req_id}: "
        if req_id not in req_ids:
            return who + f"it is in {field} and not in req_ids", "only a scheduled request has drafts"
        row = req_ids.index(req_id)
        if len(ids) >= record.num_scheduled_tokens[row]:
            counts = f"{len(ids)} drafts in {record.num_scheduled_tokens[row]} scheduled tokens"
            return who + counts, "at least one scheduled token is no draft"
        if not tells and any(ids):
            return who + f"{field} has ids at content level none", "write 0 for each draft"
        told = record.new_token_ids[row] if tells and record.new_token_ids else ()
        if tells and ids and told[-len(ids) :] != ids:
            return who + f"new_token_ids ends in {_few(told[-len(ids) :])} and its drafts are {_few(ids)}", (
                "the drafts are the last scheduled tokens"
            )
    return None


def _few(ids: Sequence[int]) -> str:
    return f"{list(ids[:4])}"[:-1] + (", ...]" if len(ids) > 4 else "]")
