"""The work of the verbs that `train` does not need. Only their modules in `clip_tools.verbs` import
it, when they run; and `train` imports `plan`, for `--dry-run`.
"""
