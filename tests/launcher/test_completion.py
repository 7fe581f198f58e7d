"""`clip-train completion SHELL`, in the shells themselves."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from launcher.cli.main import VERBS, main

WANTED = {
    "": {"train", "plan", "completion"},
    "tr": {"train"},
    "train my.yaml --dr": {"--dry-run"},
    "train my.yaml optim.l": {
        "optim.lr=",
        "optim.layer_decay=",
        "optim.lr_multipliers=",
    },
    "export runs/clip --format ": {"open_clip", "transformers"},
    "completion ": {"bash", "zsh"},
    "plan my.yaml --gp": {"--gpu"},
}
NOT_WANTED = {
    "train my.yaml --dr": {"--gpu"},
    "train my.yaml optim.l": {"run.name=", "train"},
    "tr": {"plan"},
}


@pytest.fixture(params=["bash", "zsh"])
def shell(request, tmp_path, capsys):
    """(its name, the script)"""
    assert main(["completion", request.param]) == 0
    script = tmp_path / f"clip-train.{request.param}"
    script.write_text(capsys.readouterr().out)
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed here")
    return request.param, script


def completed(shell: str, script, typed: str) -> set[str]:
    """What a Tab behind `clip-train TYPED` offers."""
    line = f"clip-train {typed}"
    words = [*line.split(), *([""] if line.endswith(" ") else [])]
    program = (
        f"source {script}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; "
        "_clip_train; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    options = {"zsh": ["-f", "-o", "KSH_ARRAYS", "-o", "SH_WORD_SPLIT"], "bash": ["--norc"]}
    line = [shell, *options[shell], "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    # zsh's compadd leaves out what does not fit
    return {
        each for each in done.stdout.splitlines() if shell != "zsh" or each.startswith(words[-1])
    }


def test_it_completes_verbs_options_choices_and_keys(shell):
    for typed, wanted in WANTED.items():
        found = completed(*shell, typed)
        assert wanted <= found, (typed, found)
        assert not NOT_WANTED.get(typed, set()) & found, (typed, found)
    assert set(VERBS) <= completed(*shell, "")


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as e:
        main(["completion", "tcsh"])
    assert e.value.code == 2 and "bash" in capsys.readouterr().err
