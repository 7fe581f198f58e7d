"""`python -m launcher` is `clip-train`."""

import sys

from clip_train.versions import too_old

for problem in too_old("Python"):  # before the imports that it could not read
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)

from launcher.cli import entry  # noqa: E402

entry()
