"""What a run says while torch.compile works."""

import re

import torch
from torch import Tensor

from titanlite.observe.compiling import CompileMonitor


def test_a_run_says_that_it_compiles_before_it_does_and_how_long_it_took() -> None:
    said: list[str] = []
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(list(said))
        return graph

    double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    with CompileMonitor("1 block with inductor", said.append) as report:
        double(torch.ones(2))
        report.end_step()
        # The next step finds its graph.
        double(torch.ones(2))
        report.end_step()
        double(torch.ones(3))
        report.end_step()
    assert seen[0] == ["compiling 1 block with inductor ..."]
    assert re.fullmatch(r"compiled: 1 graph in \d+\.\d s", said[1])
    assert said[2] == "compiling 1 block with inductor again ..."
    assert len(said) == 4
    # What is compiled after the run is not its business.
    double(torch.ones(4))
    assert len(said) == 4
