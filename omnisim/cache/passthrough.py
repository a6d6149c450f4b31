"""Values that are not cached: to the CPU once, then to each request its own.

``build_mm_cpu`` and ``to_payload_element`` carry the names and arguments of vLLM-Omni's ``utils/mm_outputs.py``, since
a runner without a prefix cache calls them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnisim.cache.errors import NestedRows, RowFormChanged, RowsMissing
from omnisim.cache.policy import KeyKind, Kinds
from omnisim.cache.spans import BatchSpans, RequestSpan

__all__ = ["build_mm_cpu", "hand_out", "hand_out_declared", "to_payload_element"]


def build_mm_cpu(multimodal_outputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same payload with every tensor detached, contiguous and on the CPU; values of None are left out."""
    moved = {key: _to_cpu(value) for key, value in (multimodal_outputs or {}).items()}
    return {key: value for key, value in moved.items() if value is not None}


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, dict):
        return build_mm_cpu(value)
    if isinstance(value, list):
        return [_to_cpu(item) for item in value]
    return value


def to_payload_element(
    element: Any,
    idx: int,
    start: int,
    end: int,
    pass_lists_through: bool = False,
    seq_len: int | None = None,
) -> Any:
    """What request ``idx``, whose tokens are ``[start, end)`` of the batch, gets of ``element``; never an alias of it.

    A tensor of ``seq_len`` rows (the total scheduled count) is cut to the request's tokens, a dict is walked, any other
    tensor is for everybody. A list is handed on whole with ``pass_lists_through`` (a later stage indexes it), else the
    request's own entry is, or the first where the list is shorter.
    """
    if isinstance(element, Tensor):
        per_token = element.ndim > 0 and element.shape[0] == seq_len
        return element[start:end].clone() if per_token else element.clone()
    if isinstance(element, dict):
        return {
            key: to_payload_element(value, idx, start, end, pass_lists_through, seq_len)
            for key, value in element.items()
        }
    if isinstance(element, list):
        if pass_lists_through:
            return [_own(item) for item in element]
        return _own(element[idx] if idx < len(element) else element[0]) if element else element
    return element


def hand_out(key: str, value: Any, spans: BatchSpans, num_padded: int, hits: set[str], step: int) -> dict[str, Any]:
    """Request id to its part of a value whose kind nobody declared: by its shape.

    ``num_padded`` is the padded count of the step: a tensor that long is cut to the tokens that were scheduled.
    """
    num_tokens = spans.num_tokens
    _refuse_nested_rows(key, value, spans, hits, step)
    value = _without_padding(value, num_tokens, num_padded) if num_padded > num_tokens else value
    return {
        req_id: to_payload_element(value, row, start, stop, pass_lists_through=True, seq_len=num_tokens)
        for req_id, row, start, stop in spans.requests
    }


def _without_padding(value: Any, num_tokens: int, num_padded: int) -> Any:
    if isinstance(value, dict):
        return {name: _without_padding(item, num_tokens, num_padded) for name, item in value.items()}
    is_padded = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_padded
    return value[:num_tokens] if is_padded else value


def _refuse_nested_rows(key: str, value: Any, spans: BatchSpans, hits: set[str], step: int) -> None:
    """Rows inside a dict are not cached, so a hit would get too few of them."""
    hit = next((request.req_id for request in spans.requests if request.req_id in hits), None)
    if hit is not None and isinstance(value, dict) and (name := _nested_rows(value, spans.num_tokens)):
        raise NestedRows(
            key=f"{key}.{name}",
            request=hit,
            step=step,
            expected="rows of a hit under a dotted name of their own, where they can be cached",
            found=f"a tensor of {spans.num_tokens} rows inside a dict",
        )


def _nested_rows(value: Mapping[Any, Any], num_tokens: int) -> str:
    for name, item in value.items():
        if isinstance(item, dict) and (inner := _nested_rows(item, num_tokens)):
            return f"{name}.{inner}"
        if isinstance(item, Tensor) and item.ndim >= 2 and item.shape[0] == num_tokens:
            return str(name)
    return ""


def hand_out_declared(key: str, kind: KeyKind | Kinds, value: Any, spans: BatchSpans, step: int) -> dict[str, Any]:
    """Request id to its part of a value of a declared kind. A request that does not decode gets no row of decoding."""
    places = spans.decode_places(kind)
    return {r.req_id: _declared(key, kind, value, r, places.get(r.req_id), step) for r in spans.requests}


def _declared(key: str, kind: KeyKind | Kinds, value: Any, request: RequestSpan, place: int | None, step: int) -> Any:
    if not _fits(kind, value):
        raise RowFormChanged(
            key=key,
            request=request.req_id,
            step=step,
            expected=f"a value of kind {_kind_name(kind)}, as declared",
            found=f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
        )
    if not isinstance(kind, KeyKind):
        return {
            name: _declared(f"{key}.{name}", kind.get(name, KeyKind.OPAQUE), item, request, place, step)
            for name, item in value.items()
        }
    try:
        return _part(kind, value, request, place)
    except IndexError:
        raise RowsMissing(
            key=key,
            request=request.req_id,
            step=step,
            expected=f"a value of kind {_kind_name(kind)} with a part for this request",
            found=f"{len(value)} in all",
        ) from None


def _fits(kind: KeyKind | Kinds, value: Any) -> bool:
    match kind:
        case KeyKind.ROW | KeyKind.DECODE_ROW | KeyKind.REQUEST:
            return isinstance(value, Tensor) and value.ndim > 0
        case KeyKind.LIST | KeyKind.LIST_OF_ONE:
            return isinstance(value, list)
        case KeyKind.SHARED | KeyKind.OPAQUE:
            return True
        case _:
            return isinstance(value, dict)


def _kind_name(kind: KeyKind | Kinds) -> str:
    return repr(kind.value) if isinstance(kind, KeyKind) else "'nested'"


def _part(kind: KeyKind, value: Any, request: RequestSpan, place: int | None) -> Any:
    match kind:
        case KeyKind.ROW:
            return _rows(value, request.start, request.stop)
        case KeyKind.REQUEST:
            return _rows(value, request.row, request.row + 1)
        case KeyKind.DECODE_ROW:
            return value[:0].clone() if place is None else _rows(value, place, place + 1)
        case KeyKind.LIST:
            return _own(value[request.row])
        case KeyKind.LIST_OF_ONE:
            return _own(value[0])
        case KeyKind.SHARED | KeyKind.OPAQUE:
            return _own(value)


def _rows(value: Tensor, start: int, stop: int) -> Tensor:
    if len(value) < stop:
        raise IndexError
    return value[start:stop].clone(memory_format=torch.contiguous_format)


def _own(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {key: _own(value) for key, value in item.items()}
    return [_own(value) for value in item] if isinstance(item, list) else item
