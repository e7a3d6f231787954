import re
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from titanlite import pickles
from titanlite.tools.verify.program.operators import OperatorPickler

LIBRARY = Path(pickles.__file__).parent


def test_code_keeps_the_name_of_its_file() -> None:
    def outer() -> list[str]:
        return [inner.__code__.co_filename for inner in (outer, lambda: None)]

    assert pickles.loads(pickles.dumps(outer))() == [__file__, __file__]


def test_operators_are_made_where_they_are_missing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        '@torch.library.custom_op("sent::twice", mutates_args=())\n'
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return 2 * x\n"
    )
    own, add = runpy.run_path(str(script))["twice"], torch.ops.aten.add
    sent = pickles.dumps((own, add, add.Tensor), OperatorPickler)
    code = f"from titanlite import pickles\nown, *others = pickles.loads({sent!r})\n"
    code += "import torch\nprint(own(torch.ones(1)).item(), *others)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0 aten.add aten.add.Tensor\n"


def test_nothing_else_pickles_functions() -> None:
    others = [path for path in LIBRARY.rglob("*.py") if path.name != "pickles.py"]
    used = [p for p in others if re.search(r"cloudpickle\.(dumps|loads|Pickler)", p.read_text())]
    assert used == []
