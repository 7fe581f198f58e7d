"""The verbs that `train` does not need. Only `launcher.cli.main` and its table import this,
lazily.
"""
