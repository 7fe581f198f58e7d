"""The verbs of `clip-train` that training does not need, a module for each: its arguments and `run`.

At its top, such a module imports nothing that takes long, so that `--help` and mistakes in
arguments are answered at once: `run` imports what it needs.
"""
