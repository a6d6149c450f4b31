"""The words of a refusal: each function looks for one kind of contradiction and says where it is, or that it is not.

None of this runs in a step whose lists agree, but for the checks of what enters or changes in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from omnisim.trace.model import Geometry, NewRequest, StepRecord

if TYPE_CHECKING:
    from omnisim.trace.expand import Runs

Fault = tuple[str, str]
"""What is wrong, and the remedy."""

PAD = -1


def geometry(cache: Geometry) -> Fault | None:
    """A group that is not there, or a kernel block size that does not divide the block size."""
    group, kernel = cache.full_attention_group, cache.kernel_block_size
    if group >= cache.num_kv_cache_groups:
        return (
            f"full_attention_group {group} is not one of {cache.num_kv_cache_groups} num_kv_cache_groups",
            "groups are counted from 0",
        )
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
    """A request is preempted or resumed that is not there."""
    return f"request {req_id}: it is in {field} and was never new, or has finished", "enter it in scheduled_new_reqs"


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


def membership(record: StepRecord, req_ids: Sequence[str]) -> Fault | None:
    """A request that is twice in the batch, or enters twice, or enters and is not in it."""
    new = [request.req_id for request in record.scheduled_new_reqs]
    resumed = record.resumed_req_ids
    for field, names in (("req_ids", req_ids), ("scheduled_new_reqs and resumed_req_ids", (*new, *resumed))):
        if len(set(names)) != len(names):
            return f"request {_twice(names)}: it is twice in {field}", "name it once"
    for field, names in (("scheduled_new_reqs", new), ("resumed_req_ids", resumed)):
        if missing := set(names).difference(req_ids):
            return f"request {min(missing)}: it is in {field} and not in req_ids", "it enters when it is scheduled"
    return None


def _twice(names: Sequence[str]) -> str:
    return next(name for at, name in enumerate(names) if name in names[:at])


def not_alive(req_id: str, finished: Collection[str]) -> Fault:
    """A scheduled request that is not there."""
    if req_id in finished:
        return f"request {req_id}: it is scheduled in the step that says it finished", "take it out of req_ids"
    return f"request {req_id}: it is scheduled and was never new, or has finished", "enter it in scheduled_new_reqs"


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
    replaced, appended, batch = record.block_ids, record.new_block_ids, set(req_ids)
    for field, changed in (("block_ids", replaced), ("new_block_ids", appended)):
        if absent := changed.keys() - batch:
            return f"request {min(absent)}: it is in {field} and not in req_ids", "rows change where they are scheduled"
        for req_id, blocks in changed.items():
            if blocks and max(blocks) >= num_blocks:
                return f"request {req_id}: block {max(blocks)} is not one of {num_blocks}", "see cache.num_blocks"
    if both := replaced.keys() & appended.keys():
        return f"request {min(both)}: it is in block_ids and in new_block_ids", "replace its row or append to it"
    return None


def continuity(req_id: str, start: int, expected: int, num_drafts: int) -> Fault:
    """Computed tokens that do not go on where the request stopped."""
    span = f"{expected - num_drafts} to {expected}" if num_drafts else f"{expected}"
    return (
        f"request {req_id}: num_computed_tokens is {start} where {span} were computed",
        "only a new or resumed request may start elsewhere",
    )


def host_counts(record: StepRecord, req_ids: Collection[str]) -> Fault | None:
    """A claim of the host about a request that is not in the batch."""
    if absent := record.host_num_computed_tokens.keys() - set(req_ids):
        return (
            f"request {min(absent)}: it is in host_num_computed_tokens and not in req_ids",
            "the batch has counts of scheduled requests only",
        )
    return None


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


def num_tokens(found: int, padded: int | None, most: int) -> Fault:
    """More tokens than a step can have, or than it has with padding."""
    if found > most:
        return f"{found} tokens are scheduled, more than {most}", "no engine does that in one step"
    if padded is not None and padded > most:
        return f"num_tokens_padded is {padded}, more than {most}", "no engine does that in one step"
    return f"num_tokens_padded is {padded} where {found} tokens are scheduled", "padding only adds"


def uncovered(req_ids: Sequence[str], record: StepRecord, rows: Sequence[Sequence[int]], block_size: int) -> Fault:
    """A span past its blocks."""
    counts = zip(req_ids, record.num_computed_tokens, record.num_scheduled_tokens, rows, strict=True)
    req_id, start, count, blocks = next(one for one in counts if one[1] + one[2] > len(one[3]) * block_size)
    covered = len(blocks) * block_size
    return (
        f"request {req_id}: positions {start} to {start + count - 1} reach past the {covered} that its {len(blocks)} "
        f"blocks cover",
        "list every block that it holds",
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


def untold(req_ids: Sequence[str], told: Sequence[Sequence[int]], known: Sequence[int], ends: Sequence[int]) -> Fault:
    """A request whose told token ids are not those of its untold positions."""
    for req_id, ids, start, end in zip(req_ids, told, known, ends, strict=True):
        if len(ids) < end - start:
            what = f"position {start + len(ids)} is scheduled and its token id is not known"
            return f"request {req_id}: {what}", "give it in new_token_ids, or state content: none"
        if len(ids) > max(0, end - start):
            what = f"{len(ids)} new_token_ids are given and {max(0, end - start)} scheduled positions are untold"
            return f"request {req_id}: {what}", "an id that the prompt or an earlier step told is not told again"
    raise AssertionError("it was looked for without need")


def unknown_prefix(req_ids: Sequence[str], computed: Sequence[int], known: Sequence[int]) -> Fault | None:
    """A request that enters behind token ids nobody told."""
    for req_id, start, stop in zip(req_ids, computed, known, strict=True):
        if start > stop:
            what = f"it starts at {start} and {stop} of its token ids are known"
            return f"request {req_id}: {what}", "give them in prompt_token_ids, or state content: none"
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
