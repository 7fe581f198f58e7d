"""`python -m launcher` is `clip-train`."""

import sys

from launcher.cli import main

sys.exit(main())
