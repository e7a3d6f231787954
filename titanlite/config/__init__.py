"""A job's TOML file and command line, checked as a whole before anything starts; torch-free.

schema.py says what keys there are, load.py reads and checks them, degrees.py counts the ranks,
checks.py asks what fits together, model.py finds the model a job names, and document.py explains
it all.
"""

from titanlite.config.checks import check_job, check_machine
from titanlite.config.degrees import make_parallel_dims
from titanlite.config.load import load_config, make_config, override
from titanlite.config.model import load_model_spec, make_model_config
from titanlite.config.schema import JobConfig

__all__ = [
    "JobConfig",
    "check_job",
    "check_machine",
    "load_config",
    "load_model_spec",
    "make_config",
    "make_model_config",
    "make_parallel_dims",
    "override",
]
