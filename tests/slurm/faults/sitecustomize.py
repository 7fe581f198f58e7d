"""Planted faults, in ranks only: Python imports this at its start where this folder is on PYTHONPATH.

FAULT=die       every rank of number 1 ends at once, without a word
FAULT=bad:n2    ranks on the host n2 find no GPU
"""

import os
import socket
import sys

fault = os.environ.get("FAULT", "")
if fault and "SLURM_STEP_NUM_TASKS" in os.environ and "train" in getattr(sys, "orig_argv", []):
    rank = os.environ.get("SLURM_PROCID")
    if fault == "die" and rank == "1":
        os._exit(3)
    if fault.startswith("bad:") and socket.gethostname() == fault[4:]:
        from clip_train.errors import RankError
        from launcher.marks import mark_error

        mark_error(RankError("LOCAL_RANK (0) has no GPU: this host shows 0"))
        os._exit(2)
