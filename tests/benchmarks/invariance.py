"""The difference of plans from one process: the debug job for 20 AdamW steps in float64.

    python tests/benchmarks/invariance.py

Prints for each plan the largest relative difference of the loss and the gradient norm in any step,
of any weight at the end, and of any gradient in steps 1, 2 and 20. The relative difference of a
tensor is max|a - b| / max|b|.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from communication import PARALLELISM, SHARD
from training import debug_config, differences, train

PLANS = ["ddp4", "fsdp4", "hsdp2x2", "tp4", "tp4_gathered", "tp2_fsdp2", "tp2_ddp2"]


def main() -> None:
    configs = [debug_config({"parallelism": PARALLELISM[plan]}) for plan in PLANS]
    (reference,) = train([debug_config()])
    # The control: one process with the batch in four parts; only the order of sums differs.
    (parts,) = train([debug_config({"parallelism": {SHARD: 1}})])
    (whole,) = train([debug_config({"training": {"local_batch_size": 8}})])
    print(f"{'plan':16}{'loss':>10}{'norm':>10}{'weights':>10}{'gradients':>11}")
    trained = [("one, split", parts, whole)]
    trained += [(p, t, reference) for p, t in zip(PLANS, train(configs), strict=True)]
    for plan, training, against in trained:
        found: dict[str, Any] = differences(training, against)
        gradients = max(value for name, value in found.items() if name.startswith("gradient"))
        figures = (found["loss"], found["norm"], found["weights"])
        print(f"{plan:16}" + "".join(f"{f:10.0e}" for f in figures) + f"{gradients:11.0e}")


if __name__ == "__main__":
    main()
