"""What is checked of the outputs of a replay: an id and a sentence each."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CHECKS", "gravest"]

CHECKS = {
    "dtype": "what comes has the dtype of what the model emitted",
    "absent-rows": "a hit gets no rows for positions at which the key was not emitted",
    "isolation": "no row of another content reaches a request",
    "never-written": "no row reaches a request that nobody wrote",
    "padding": "no padding row reaches a request",
    "row-count": "a request gets as many rows as it is due",
    "rows": "each row is the one that is due",
    "once-in-order": "a request gets its positions once and in order; what a resumed one gets again is the same",
    "keys": "every request gets every key that the step emitted, and nobody gets anything else",
    "device": "what comes is on the CPU",
    "contiguous": "what comes is contiguous",
    "detached": "what comes carries no autograd graph",
    "pass-through": "values that are not cached reach the request that they are for",
    "aliasing": "nothing that was handed out changes afterwards",
    "inputs-unchanged": "the subject changes none of its inputs",
    "deferred-bound": "no deferred rows are kept for requests that are over",
}
"""The more telling first: an output that fails several is reported under the first of them."""

_RANK = {check: rank for rank, check in enumerate(CHECKS)}


def gravest(failed: Iterable[str]) -> str:
    """The most telling of some check ids."""
    return min(failed, key=_RANK.__getitem__)
