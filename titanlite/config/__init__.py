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
from titanlite.config.checks import check_machine
from titanlite.config.degrees import make_parallel_dims
from titanlite.config.load import Reading, load_config, override, parse_args, read_any, read_job
from titanlite.config.model import load_model_spec, make_model_config
from titanlite.config.resolve import ResolvedJob, resolve_job
from titanlite.config.schema import JobConfig

__all__ = [
    "JobConfig",
    "Reading",
    "ResolvedJob",
    "check_machine",
    "load_config",
    "load_model_spec",
    "make_model_config",
    "make_parallel_dims",
    "override",
    "parse_args",
    "read_job",
    "read_any",
    "resolve_job",
]
