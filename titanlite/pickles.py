"""Values and functions sent to ranks: cloudpickle, whose code keeps the name of its file.

cloudpickle 3.1.3 replaces that name by "<dynamic-code>". An error on a rank then names no file, and
its traceback shows no lines. Functions of a notebook or of a script can be sent too.
"""

import importlib
import io
import sys
from collections import ChainMap
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle


def _reduced(code: CodeType) -> tuple[Any, ...]:
    make, arguments, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _restored, (make, arguments, code.co_filename)


def _restored(make: Any, arguments: tuple[Any, ...], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """A module of a class of its own, such as torch's settings, is imported by its name."""
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            name: str = obj.__name__
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        return super().reducer_override(obj)


def dumps(value: Any, kind: type[Pickler] = Pickler) -> bytes:
    """`value`, pickled by a Pickler of this kind."""
    buffer = io.BytesIO()
    kind(buffer).dump(value)
    return buffer.getvalue()


loads = cloudpickle.loads
