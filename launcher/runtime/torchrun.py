"""torchrun with its ranks' exit status: `python -m launcher.runtime.torchrun --nproc-per-node 8 -m launcher train R`.

torchrun itself makes 1 of any status but 0, and nothing that a rank does can change that: it ends with an exception
of its own. USR1 kills it, and it gives its ranks 30 s to save. This is the same program with the same arguments, which
ends with 75 where its ranks did (2, 1 likewise), hands USR1 on, and waits as long as a save may take.
"""

from __future__ import annotations

import os
import sys

from clip_train.stop import StopRequest


def main(arguments: list[str], stop: StopRequest) -> int:
    from launcher.runtime.launch import AGENTS_SIGNALS, SAVE_SECONDS, run_agent

    # torchrun's own names for the defaults of its options: what the command line says still wins
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", AGENTS_SIGNALS)
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    from torch.distributed.run import parse_args, run

    return run_agent(lambda: run(parse_args(arguments)), stop)


if __name__ == "__main__":
    listening = StopRequest()
    listening.listen()  # before the imports, during which a signal would otherwise be lost
    sys.exit(main(sys.argv[1:], listening))
