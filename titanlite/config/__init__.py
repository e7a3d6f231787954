"""A job's TOML file and command line, checked as a whole before anything starts; torch-free.

schema.py says what keys there are, load.py reads and checks them, degrees.py counts the ranks,
checks.py asks what fits together, model.py finds the model a job names, resolve.py puts together
what ranks are given, and document.py explains it all.
"""

from titanlite.config.checks import check_machine
from titanlite.config.degrees import make_parallel_dims
from titanlite.config.load import Reading, load_config, make_config, override, read_job
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
    "make_config",
    "make_model_config",
    "make_parallel_dims",
    "override",
    "read_job",
    "resolve_job",
]
