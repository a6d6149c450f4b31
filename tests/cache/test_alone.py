"""``omnisim.cache`` stands alone: it needs torch and NumPy, and nothing else of omnisim or of its dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if blocked(name):
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)

sys.meta_path.insert(0, Blocker())
"""

USE = """
import torch
from types import SimpleNamespace
from omnisim.cache import OmniTensorPrefixCache

cache = OmniTensorPrefixCache(4, 2, 3, torch.float32)
first, second = torch.rand(2, 3), torch.rand(1, 3)
cache.update_omni_tensor_prefix_cache(first, {"K": first}, 2, torch.tensor([2, 3]))
cache.reset_prefix_cached_new_req_ids()
cache.add_prefix_cached_new_req_id("B")
table = SimpleNamespace(block_table=SimpleNamespace(cpu=torch.tensor([[1, 2]])))
tables = type("Tables", (list,), {"block_tables": property(list)})([table])
batch = SimpleNamespace(req_ids=["B"], req_id_to_index={"B": 0}, num_computed_tokens_cpu=[2], block_table=tables)
cache.update_omni_tensor_prefix_cache(second, {"K": second}, 1, torch.tensor([4]))
merged = cache.get_merged_hidden_states([0], batch, second, {"B": 1})
merged_k = cache.get_merged_multimodal_states([0], batch, {"K": second}, {"B": 1})
assert torch.equal(merged["B"], torch.cat([first, second]))
assert torch.equal(merged_k["K"]["B"], torch.cat([first, second]))
"""


def run(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cache_works_where_nothing_else_of_omnisim_nor_vllm_nor_another_dependency_can_be_imported() -> None:
    blocked = """
def blocked(name):
    if name.startswith("omnisim."):
        return name != "omnisim.cache" and not name.startswith("omnisim.cache.")
    others = "vllm", "vllm_omni", "msgspec", "typer", "rich", "yaml", "zstandard", "safetensors"
    return name.partition(".")[0] in others
"""
    run(blocked + BLOCKER + USE)


def test_importing_the_cache_loads_nothing_else_of_omnisim() -> None:
    loaded = run("import omnisim.cache, sys; print(*(name for name in sys.modules if name.startswith('omnisim')))")
    assert {name for name in loaded.split() if not name.startswith("omnisim.cache")} == {"omnisim"}
