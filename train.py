"""Train a model from one TOML file: torchrun train.py --job.config_file=configs/tp2_fsdp2.toml

titanlite/run.py contains the run itself. `--help` lists the sections, `--help SECTION` their keys.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports below ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from titanlite.cli import tools
from titanlite.run import main

if __name__ == "__main__":
    status = main(sys.argv[1:], tools())
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        # Everything is closed. Skip unloading torch: its threads sometimes abort the process then.
        os._exit(status)
    sys.exit(status)
