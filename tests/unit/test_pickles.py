import re
from pathlib import Path

from titanlite import pickles

LIBRARY = Path(pickles.__file__).parent


def test_code_keeps_the_name_of_its_file() -> None:
    def outer() -> list[str]:
        return [inner.__code__.co_filename for inner in (outer, lambda: None)]

    assert pickles.loads(pickles.dumps(outer))() == [__file__, __file__]


def test_nothing_else_pickles_functions() -> None:
    others = [path for path in LIBRARY.rglob("*.py") if path.name != "pickles.py"]
    used = [p for p in others if re.search(r"cloudpickle\.(dumps|loads|Pickler)", p.read_text())]
    assert used == []
