"""The prefix cache of rows. It stands alone: nothing here needs the rest of omnisim, nor vLLM."""

from omnisim.cache.errors import PrefixCacheError
from omnisim.cache.passthrough import build_mm_cpu, to_payload_element
from omnisim.cache.policy import KeyKind, ModelPolicy
from omnisim.cache.prefix_cache import Counters, OmniTensorPrefixCache
from omnisim.cache.spans import InputBatch

__all__ = [
    "Counters",
    "InputBatch",
    "KeyKind",
    "ModelPolicy",
    "OmniTensorPrefixCache",
    "PrefixCacheError",
    "build_mm_cpu",
    "to_payload_element",
]
