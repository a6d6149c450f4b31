"""A talker's declaration as the cache's model policy."""

from __future__ import annotations

from collections.abc import Mapping

from omnisim.cache.policy import KeyKind, Kinds, ModelPolicy
from omnisim.talker import KeySpec, Talker

__all__ = ["policy_of"]


def policy_of(talker: Talker) -> ModelPolicy:
    """The policy that a model with these outputs would declare."""
    return ModelPolicy(
        requires_full_prefix_cached_hidden_states=talker.requires_full_prefix_cached_hidden_states,
        deferred_mm_cache_keys=talker.deferred_keys,
        kinds=_kinds(talker.keys),
    )


def _kinds(keys: Mapping[str, KeySpec]) -> Kinds:
    return {name: _kinds(key.fields) if key.kind == "nested" else KeyKind(key.kind) for name, key in keys.items()}
