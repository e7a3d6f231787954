"""`python -m titanlite` is `titanlite`."""

import sys

from titanlite.cli import main

sys.exit(main())
