"""`python -m titanlite` runs the `titanlite` command."""

import sys

from titanlite.cli import main

sys.exit(main())
