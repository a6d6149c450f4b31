"""Schedules in which caches go wrong, with the talkers that show it: the corpus of the replay tests.

Each is named by behaviour and told after a public report (``U/n`` is vllm-project/vllm-omni, ``V/n`` vllm-project/vllm)
or after a finding on released code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omnisim.talker import KeySpec, Talker
from omnisim.trace import Trace
from omnisim.trace.story import story_trace

FORMAT = "omnisim-talker/1"

HIDDEN = Talker(format=FORMAT, name="hidden", hidden_size=8, dtype="bfloat16")
ROWS = Talker(
    format=FORMAT,
    name="rows",
    hidden_size=8,
    dtype="float32",
    keys={
        "K": KeySpec(kind="row", shape=(4,), dtype="int32"),
        "P": KeySpec(kind="row", shape=(8,), dtype="bfloat16", padded=True),
        "R3": KeySpec(kind="row", shape=(3, 2), dtype="float32"),
    },
)
DEFERRED = Talker(
    format=FORMAT,
    name="deferred",
    hidden_size=8,
    dtype="float32",
    requires_full_prefix_cached_hidden_states=False,
    keys={"K": KeySpec(kind="row", shape=(4,), dtype="int64", deferred=True)},
)
LATE = Talker(
    format=FORMAT,
    name="late",
    hidden_size=8,
    dtype="float16",
    keys={"K": KeySpec(kind="row", shape=(4,), dtype="int32", phases=("decode",))},
)
VALUES = Talker(
    format=FORMAT,
    name="values",
    hidden_size=8,
    dtype="float64",
    keys={
        "ref_code_len": KeySpec(kind="row", dtype="int32", padded=True),
        "codec_streaming": KeySpec(kind="row", dtype="int8"),
        "spk": KeySpec(kind="request", shape=(4,), dtype="float32"),
        "codes": KeySpec(kind="decode-row", shape=(4,), dtype="int64"),
        "codes.ref": KeySpec(kind="list", shape=(2, 4), dtype="int64"),
        "bos": KeySpec(kind="list-of-one", shape=(4,), dtype="bfloat16"),
        "sr": KeySpec(kind="shared", dtype="int32"),
        "sr_1d": KeySpec(kind="shared", shape=(1,), dtype="int32"),
        "flag": KeySpec(kind="opaque", value="text"),
        "meta": KeySpec(
            kind="nested",
            fields={
                "len": KeySpec(kind="request", shape=(1,), dtype="int64"),
                "frame": KeySpec(kind="decode-row", shape=(4,), dtype="int32"),
                "deep": KeySpec(kind="nested", fields={"id": KeySpec(kind="list", shape=(4,), dtype="int32")}),
            },
        ),
    },
)
TALKERS = (HIDDEN, ROWS, DEFERRED, LATE, VALUES)


@dataclass(frozen=True)
class Story:
    """A schedule, and what ``builtin`` does with it: it agrees, it refuses by an error of this name, or (where the
    schedule itself gives a request another content's rows) it diverges at this check."""

    name: str
    text: str
    refusal: str = ""
    divergence: str = ""
    has_hit: bool = True
    only: tuple[Talker, ...] = TALKERS
    geometry: dict[str, Any] = field(default_factory=dict)

    def trace(self, talker: Talker) -> Trace:
        return story_trace(self.text, talker=talker, **self.geometry)


STORIES = (
    Story("partial block (U/4624)", "new A c=0 n=8 [1,2]\nnew B c=7 n=2 [1,2,3]"),
    Story(
        "same-step hit (U/7877, V/38715)",
        "new Z c=0 n=4 [1]\nfin Z; new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]",
    ),
    Story(
        "same-step hit, reader first (U/7877)",
        "new Z c=0 n=4 [1]\nfin Z; new B c=4 n=3 [1,3]; new A c=0 n=8 [1,2]",
    ),
    Story("one step late (U/6323)", "new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]\nrun A c=8 n=1 [1,2,4]; run B c=7 n=1"),
    Story(
        "delayed read (U/6654)",
        "new A c=0 n=4 [1]\nfin A; new B c=4 n=2 [1,3]\nfin B; new C c=0 n=4 [1]\nrun C c=4 n=1 [1,2]",
    ),
    Story(
        "live buffer (U/6039)",
        "new A c=0 n=4 [1]; new C c=0 n=4 [4]\nrun A c=4 n=1 [1,2]; run C c=4 n=1 [4,5]\nfin A; new B c=4 n=2 [1,3]",
    ),
    Story("marks (run)", "new A c=0 n=4 [1]\nnew B c=4 n=2 [1,3]\nrun B c=6 n=1\nrun A c=4 n=1 [1,2]; run B c=7 n=1"),
    Story("chunked tail (U/2164)", "new A c=0 n=4 [1]\nnew B c=4 n=2 [1,3]\nrun B c=6 n=2\nrun B c=8 n=1 [1,3,4]"),
    Story("full-prompt hit (V/17999)", "new A c=0 n=8 [1,2]\nfin A; new B c=4 n=4 [1,3]\nrun B c=8 n=1 [1,3,4]"),
    Story("hit of several blocks", "new A c=0 n=13 [5,2,7,3]\nrun A c=13 n=1\nfin A; new B c=12 n=2 [5,2,7,9]"),
    Story(
        "resume (U/7902, U/8034)",
        "new A c=0 n=8 [1,2]\nnew B c=0 n=4 [3]; preempt A\nresume A c=4 n=5 [1,9,10]; run B c=4 n=1 [3,4]",
        has_hit=False,
    ),
    Story(
        "resume past what was delivered (U/8034)",
        "new A c=0 n=4 [1] p=8\nnew B c=4 n=5 [1,3,4]; preempt A\nresume A c=8 n=1 [1,3,9]",
        divergence="isolation",  # told so, A resumes over positions that only B computed, with tokens of B's own
    ),
    Story(
        "forced reset (V/28827)",
        "new A c=0 n=4 [1]; new B c=0 n=5 [2,3]\nrun A c=4 n=1 [1,4]; run B c=5 n=1; new C c=4 n=1 [1,9]\n"
        "preempt A B C; resume A c=0 n=6 [5,6]; resume B c=0 n=7 [7,8]; resume C c=0 n=6 [10,11]",
    ),
    Story(
        "replaced prompt (U/8068, V/49449)",
        "new A c=0 n=8 [1,2] gen=0\nreplace A c=0 n=8 [3,4] gen=1\nrun A c=8 n=1 [3,4,5]",
        has_hit=False,
    ),
    Story(
        "continuation (U/6039)",
        "new A c=0 n=4 [1]\nreplace A c=4 n=2 [1,3]\nrun A c=6 n=1",
        has_hit=False,  # its consumer has had these rows
    ),
    Story(
        "optimistic counts (V/32951)",
        "new A c=0 n=8 [1,2]\nrun A c=8 n=4 [1,2,3] drafts=3\n"
        "run A c=10 n=1\nrun A c=11 n=1\nfin A; new B c=8 n=1 [1,2,5]",
    ),
    Story(
        "null block (V/14097)",
        "new A c=0 n=4 [2]; new B c=0 n=8 [1,3]\nfin A B\nnew C c=8 n=1 [0,3,4]",
        refusal="NeverWritten",
    ),
    Story("external KV (U/6654)", "new B c=4 n=1 [5,3]", refusal="NeverWritten"),
    Story(
        "kernel block (U/6654)",
        "new A c=0 n=8 [2,3]\nfin A; new B c=8 n=1 [2,3,6]",
        refusal="UnsupportedLayout",
        geometry={"block_size": 8, "kernel_block_size": 4},
    ),
    Story(
        "two KV-cache groups (U/2164)", "new A c=0 n=4 [1]\nnew B c=4 n=2 [1,3]", geometry={"num_kv_cache_groups": 2}
    ),
    Story("pad slot (V/43810)", "new A c=0 n=4 [1]; slots [4,5,6,-1]\nrun A c=4 n=1 [1,2]", has_hit=False),
    Story("deferred, shifted (run)", "new A c=0 n=4 [1]\nfin A; new B c=4 n=3 [1,3]\nfin B; new C c=4 n=1 [1,5]"),
    Story("deferred, still running (run)", "new A c=0 n=4 [1]\nrun A c=4 n=1 [1,2]; new B c=4 n=2 [1,3]"),
    Story(
        "deferred, abort (U/6039)",
        "new A c=0 n=4 [1]; new D c=0 n=2 [5]\nrun D c=2 n=1\n"
        "fin A; run D c=3 n=1\nrun D c=4 n=1 [5,6]; new B c=4 n=2 [1,3]",
    ),
    Story(
        "deferred, block taken over (run)",
        "new A c=0 n=5 [1,2]; new X c=0 n=2 [7]\npreempt A; new B c=0 n=4 [1]; run X c=2 n=1\n"
        "resume A c=0 n=6 [3,4]; run B c=4 n=1 [1,5]\nfin A; run B c=5 n=1\nfin B; new C c=4 n=2 [1,6]",
    ),
    Story(
        "recycled block (run)",
        "new Z c=0 n=4 [1]\nfin Z; new A c=0 n=4 [1]; no K\nfin A; new B c=4 n=2 [1,3]",
        only=(ROWS, DEFERRED),
    ),
    Story(
        "late key (U/4169)", "new A c=0 n=4 [1]; no K\nrun A c=4 n=1 [1,2]\nnew B c=4 n=2 [1,3]", only=(ROWS, DEFERRED)
    ),
    Story("None at prefill (U/4199)", "new A c=0 n=4 [1]\nrun A c=4 n=1 [1,2]\nrun A c=5 n=1; new B c=4 n=2 [1,3]"),
    Story(
        "1-D metadata (U/3665)",
        "new A c=0 n=2 [1]; new B c=0 n=3 [2]\nrun A c=2 n=1; run B c=3 n=1\nrun B c=4 n=1 [2,3]",
        has_hit=False,
    ),
    Story(
        "padded step (run)",
        "new A c=0 n=2 [1]; new B c=0 n=3 [2]; pad 8\nrun A c=2 n=1; run B c=3 n=1; pad 4\n"
        "fin A B; new C c=0 n=5 [1,4]; pad 8\nrun C c=5 n=1; new D c=4 n=1 [1,6]; pad 4",
    ),
    Story(
        "as many requests as tokens (U/4355)",
        "new A c=0 n=4 [1]; new B c=0 n=4 [2]\nrun A c=4 n=1 [1,3]; run B c=4 n=1 [2,4]\n"
        "run A c=5 n=1; run B c=5 n=1; new C c=4 n=2 [1,5]",
    ),
    Story(
        "one decodes, one prefills (U/4355)",
        "new A c=0 n=4 [1]\nrun A c=4 n=1 [1,3]; new B c=0 n=3 [2]\nnew C c=0 n=2 [4]; run A c=5 n=1; run B c=3 n=1",
        has_hit=False,
    ),
    Story(
        "hits in two steps on one row",
        "new A c=0 n=4 [1]\nfin A; new B c=4 n=2 [1,3]\nfin B; new C c=4 n=2 [1,4]\nfin C; new D c=4 n=3 [1,5]",
    ),
    Story(
        "block reused by another",
        "new A c=0 n=8 [1,2]\nrun A c=8 n=1 [1,2,3]\nfin A; new B c=0 n=8 [1,2]\n"
        "fin B; new C c=4 n=5 [1,4,5]\nrun C c=9 n=1",
    ),
    Story(
        "same ids, other content (U/4008, V/30931)",
        "new A c=0 n=4 [1] content=x\nfin A; new B c=4 n=2 [1,3] content=y",
        divergence="isolation",
    ),
    Story(
        "other content behind a shared prompt (V/20261)",
        "new A c=0 n=8 [1,2] content=x@4\nfin A; new B c=4 n=4 [1,3] content=y@4",
    ),
)
