"""The verbs that `train` does not need. Only `launcher.cli.main` imports them, lazily;
and `train` imports `plan`, for `--dry-run`.
"""
