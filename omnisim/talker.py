"""A talker: what a model emits in a step and how it wants it cached, as a declaration.

"Talker" is any stage, thinkers too. The file form is YAML, one talker a file, strict.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["FORMAT", "KeySpec", "Talker"]

FORMAT = "omnisim-talker/1"

Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
StepIndex = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Kind = Literal["row", "decode-row", "request", "shared", "list", "list-of-one", "nested", "opaque"]


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class KeySpec(_Strict, frozen=True, kw_only=True):
    """One key of the multimodal outputs. ``T`` tokens scheduled, ``P`` the same padded, ``B`` requests in the batch.

    ``row``          tensor ``[T, *shape]`` (``[P, *shape]`` if ``padded``), a row a scheduled token. With an empty
                     shape it is 1-D metadata: cut per request, never cached.
    ``decode-row``   tensor ``[D, *shape]``, a row for each of the D requests that decode; never cached.
    ``request``      tensor ``[B, *shape]``, a row a request; never cached.
    ``shared``       tensor ``shape`` (may be 0-dim), the same for all requests.
    ``list``         one tensor ``shape`` a request, in batch order; for the first ``entries`` requests only, if told.
    ``list-of-one``  a list with one tensor ``shape``, the same for all requests.
    ``nested``       a dict of ``fields``, each declared like a key.
    ``opaque``       ``value``, handed on as it is.

    Of rows that are ``filled`` ``last`` a step fills each request's last one, and the others are zeros.

    A key is emitted in a step where some request is in one of its ``phases`` (a request decodes once all its prompt
    tokens are computed).
    """

    kind: Kind
    shape: tuple[Annotated[int, Meta(ge=0, le=2**24)], ...] = ()
    dtype: Dtype = "float32"
    deferred: bool = False
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    padded: bool = False
    filled: Literal["every", "last"] = "every"
    entries: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    fields: dict[str, KeySpec] = {}
    value: str | int | float | bool | None = None


class Talker(_Strict, frozen=True, kw_only=True):
    """What a model emits in a step.

    ``hidden_size`` and ``dtype`` are of the hidden states, ``[P, hidden_size]`` (``[T, hidden_size]`` if not
    ``hidden_padded``). ``when_empty`` is what the multimodal outputs are in a step that emits no key: None or an empty
    dict. Names of ``requires_full_prefix_cached_hidden_states`` and of deferred keys are vLLM-Omni's model policy.
    ``changes`` are a model that does not keep to its declaration: from this step on the key (``hidden_states`` too) is
    emitted like this, and is due like this. What a cache is told of the model stays as declared.
    """

    format: Literal["omnisim-talker/1"]
    name: str
    summary: str = ""
    sources: tuple[str, ...] = ()
    hidden_size: Annotated[int, Meta(ge=1, le=2**20)]
    dtype: Dtype = "bfloat16"
    hidden_padded: bool = True
    requires_full_prefix_cached_hidden_states: bool = True
    when_empty: Literal["none", "empty"] = "none"
    keys: dict[str, KeySpec] = {}
    changes: dict[StepIndex, dict[str, KeySpec]] = {}

    @property
    def deferred_keys(self) -> frozenset[str]:
        """Names of the keys whose cache writes the model asks to defer."""
        return frozenset(name for name, key in self.keys.items() if key.deferred)
