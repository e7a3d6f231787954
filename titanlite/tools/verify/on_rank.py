"""What ranks are asked to run, in modules that import torch, which the caller does without.

`run.run_plan` is a name here, "module:function", which a rank imports. Type checkers see the
function itself, so they check the arguments of every call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.tools.verify import inspect_model, job_trace, reload, run  # noqa: F401
    from titanlite.tools.verify.program import parallel, reference, through, uses, weights  # noqa: F401


class _Names:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, function: str) -> str:
        return f"titanlite.tools.verify.{self._module}:{function}"


def __getattr__(module: str) -> Any:
    if module in ("inspect_model", "job_trace", "reload", "run"):
        return _Names(module)
    if module in ("parallel", "reference", "through", "uses", "weights"):
        return _Names(f"program.{module}")
    raise AttributeError(module)
