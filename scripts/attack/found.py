"""What the cases have found: mended, by the commit; or left, and why."""

from __future__ import annotations

FIRST = "e2d0b973"
MENDED = {
    **dict.fromkeys(
        [
            "long names without end",
            "a sample of 60 members of 250 MiB",
            "a recipe that is not UTF-8",
            "a recipe a hundred thousand brackets deep",
            "/dev/zero for a recipe",
            "a config a million brackets deep",
            "metrics.jsonl of the run: a pipe in its place",
            "metrics.jsonl of the run: a folder in its place",
            "attempts.jsonl of the run: a pipe in its place",
            "resolved.yaml of the run: a folder in its place",
            "VERDICT of the run: a pipe in its place",
            "a read-only run directory",
            "a password in data.val",
            "a variable in log.notify",
            "an option in log.notify",
        ],
        FIRST,
    ),
    **dict.fromkeys(
        [
            "the run directory removed",
            "the run directory renamed",
            "a file in place of the run directory",
        ],
        "4cdfd414",
    ),
    **dict.fromkeys(
        [f"ulimit -u {n}, 1 rank" for n in (1, 4, 8, 14)],
        "4fded24d",
    ),
    **dict.fromkeys(
        [f"launcher interrupted twice, {n} ranks" for n in (2, 3)],
        "cc008fb8",
    ),
    **dict.fromkeys(["ulimit -f of 64 kiB", "files of 100 kiB once it runs"], "6bde2154"),
    **dict.fromkeys(
        [
            "an S3 listing of 100,000 names with newlines, without end",
            "an S3 listing without end, 1,000 names in 5 seconds",
            "a byte every 5 seconds",
        ],
        "4e20e1b7",
    ),
    **dict.fromkeys(["an answer without end", "PPM in letters"], "e4af8ede"),
    "the same line twice in one second": "59ffe162",
    **dict.fromkeys(["ulimit -u 20, 1 rank", "ulimit -u 20, 2 ranks"], "167b96b8"),
}
KNOWN = {
    "a million empty members": "each reading of its 512 MB takes 5 CPU seconds, and it is read every epoch",
    "a server that repeats it in the reason": "words of a server that hold the bare secret are shown",
    "20 images of 200 MiB": "a block of samples is in memory; lower `data.shuffle_block`",
    "20 unused members of 200 MiB": "the same",
    **dict.fromkeys(
        [f"the end of a run by {name}" for name in ("SIGKILL", "SIGABRT", "SIGSEGV")],
        "the folder of Python's fork server stays in the temporary folder, since no process "
        "that knows it is left",
    ),
    "the end of a run by a kill of all": (
        "the same folder stays, and so do the names of semaphores (32 bytes each), since Python's "
        "resource tracker was killed too"
    ),
}
