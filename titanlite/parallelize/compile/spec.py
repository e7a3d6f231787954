"""torch.compile, block by block; torch-free."""

import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from titanlite.fields import Name, Section, Values, key, reads
from titanlite.parallelize.compile.backends import backend_problems
from titanlite.parallelize.feature import Feature, Variation

if TYPE_CHECKING:
    from titanlite.config.draft import Draft
    from titanlite.config.schema import JobConfig


class Compile(Section):
    """torch.compile"""

    enable: bool = key(False, "compile the components below")
    components: Values[Literal["model", "loss"]] = key(
        ("model", "loss"), "what to compile: the model (block by block), the loss"
    )
    backend: Name = key("inductor", "name of the compiler backend")


@reads("compile")
def _compilation(job: "Draft") -> Iterator[str]:
    """compile.enable = true needs at least one component."""
    if job.config.compile.enable and not job.config.compile.components:
        yield (
            'compile.components: is empty, so nothing would be compiled; add "model" or "loss", '
            "or set compile.enable = false"
        )


def _machine_problems(config: "JobConfig", device_type: str) -> Iterator[str]:
    compiled = config.compile
    if not compiled.enable:
        return
    if compiled.backend == "inductor" and device_type == "cpu":
        # The same choice as PyTorch's inductor makes.
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            yield (
                f'compile.backend: "inductor" needs a C++ compiler on CPU, but there is no '
                f"{compiler} on the PATH; install it, or set compile.enable = false"
            )
    yield from backend_problems(compiled.backend)


COMPILE = Feature(
    "compile",
    "compile",
    is_on=lambda config: config.compile.enable,
    sections={"compile": Compile},
    checks=(_compilation,),
    machine_problems=_machine_problems,
    variations=(
        Variation(
            "compile",
            {"off": {}, "on": {"compile.enable": True, "compile.backend": "aot_eager"}},
            on_request=True,
        ),
    ),
    off={"compile.enable": False},
)
