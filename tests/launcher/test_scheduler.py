"""Which nodes a job can do without, from what Slurm's commands answer; they are stand-ins."""

from __future__ import annotations

import os
import re

import pytest

from launcher.slurm.scheduler import NotLeftOut, exclusion

SHOWN = """JobState=PENDING Partition=gpu
   ReqNodeList={required} ExcNodeList={excluded}
   Features={features} DelayBoot=00:00:00"""
ASKED = {"required": "(null)", "excluded": "(null)", "features": "(null)"}
GPU = "64 1000 0 gpu:h100:8"  # processors, memory, disk, GPUs
NODES = [f"n{n} idle h100,ib {GPU}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "shown, nodes, sent, refused",
    [
        (SHOWN.format(**ASKED), NODES, "n1", None),
        # what the user has excluded stays so; the update sets the list
        (SHOWN.format(**ASKED | {"excluded": "n[8-9]"}), NODES, "n[8-9],n1", None),
        (SHOWN.format(**ASKED | {"excluded": "n2,n3"}), NODES, None, "there are not 1 others"),
        (SHOWN.format(**ASKED | {"excluded": "n1"}), NODES, "", None),  # already
        (SHOWN.format(**ASKED | {"excluded": "n2,unknown"}), NODES, None, "does not tell the nodes of n2,unknown"),
        (SHOWN.format(**ASKED | {"required": "n1"}), NODES, None, "asks for n1 by name"),
        # only what the job may use counts
        (SHOWN.format(**ASKED | {"features": "h100"}), NODES, "n1", None),
        (SHOWN.format(**ASKED | {"features": "h10"}), NODES, None, "there are not 1 others"),
        (SHOWN.format(**ASKED | {"features": "h100|a100"}), NODES, None, "constraint (h100|a100) cannot be counted"),
        (SHOWN.format(**ASKED), [NODES[0], "n2 idle h100 64 1000 0 gpu:a100:8"], None, "there are not 1 others"),
        (SHOWN.format(**ASKED), [NODES[0], f"n2 down* h100 {GPU}"], None, "there are not 1 others"),
        (SHOWN.format(**ASKED) + " Reservation=mine", NODES, None, "the reservation mine"),
        (SHOWN.format(**ASKED) + " Contiguous=1", NODES, None, "contiguous"),
        (SHOWN.format(**ASKED) + " Contiguous=0", NODES, "n1", None),
        # an answer that is not one
        ("", NODES, None, "does not tell what the job asks for"),
        ("slurm_load_jobs error: Unable to contact slurm controller", NODES, None, "does not tell what the job asks"),
        (SHOWN.format(**ASKED).replace("Features", "Eigenschaften"), NODES, None, "does not tell what the job asks"),
        (SHOWN.format(**ASKED), [], None, "there are not 1 others"),
        (SHOWN.format(**ASKED), ["n1 idle", "n2 idle", "n3 idle"], None, "there are not 1 others"),
    ],
)
def test_a_node_is_left_out_only_where_the_job_still_starts(tmp_path, monkeypatch, shown, nodes, sent, refused):
    (tmp_path / "shown").write_text(shown)
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    names = 'case "$3" in *unknown*) exit 1;; n\\[8-9\\]) echo n8 n9;; *) echo "$3" | tr , " ";; esac'
    commands = {
        "scontrol": f'case "$*" in "show job 7") cat {tmp_path}/shown;; "show hostnames "*) {names};; esac',
        "sinfo": f'[ "$4" = gpu ] && cat {tmp_path}/nodes',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if refused is None:
        assert exclusion("7", ["n1"], ["n1"], "gpu") == sent
    else:
        with pytest.raises(NotLeftOut, match=re.escape(refused)):
            exclusion("7", ["n1"], ["n1"], "gpu")
