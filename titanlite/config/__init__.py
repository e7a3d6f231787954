"""Read a job from a TOML file and the command line, and check it; torch-free.

schema.py    all keys: types, defaults, one line of text each; absent.py has TorchTitan's others
load.py      reads a file and a command line, and collects every mistake
degrees.py   the degree of each mesh axis for a number of ranks
checks.py    checks keys against each other, with data.py, pipeline.py and checkpoint.py
model.py     finds the model that [model] names, and its sizes
resolve.py   ResolvedJob, which is sent to the ranks
document.py  --help, and a configuration as TOML
"""

import titanlite.register  # noqa: F401 (a job can name what is built in)
from titanlite.config.checks import check_machine as check_machine
from titanlite.config.degrees import make_parallel_dims as make_parallel_dims
from titanlite.config.load import Reading as Reading
from titanlite.config.load import load_config as load_config
from titanlite.config.load import override as override
from titanlite.config.load import parse_args as parse_args
from titanlite.config.load import read_any as read_any
from titanlite.config.load import read_job as read_job
from titanlite.config.model import load_model_spec as load_model_spec
from titanlite.config.model import make_model_config as make_model_config
from titanlite.config.resolve import ResolvedJob as ResolvedJob
from titanlite.config.resolve import resolve_job as resolve_job
from titanlite.config.schema import JobConfig as JobConfig
