"""`recipes/distill.py` sharded by FSDP on the CPU, where Accelerate shards nothing, and says nothing of it."""

from __future__ import annotations

import runpy
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ROOT = Path(__file__).resolve().parents[2]
started = PartialState.__init__


def as_on_gpus(state: PartialState, *args: object, **options: object) -> None:
    started(state, *args, **options)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = as_on_gpus  # type: ignore[method-assign]
    runpy.run_path(str(ROOT / "recipes" / "distill.py"), run_name="__main__")
    if AcceleratorState().distributed_type != DistributedType.FSDP:
        raise SystemExit("nothing was sharded")
