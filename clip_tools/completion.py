"""`clip-train completion SHELL`: a script by which the shell completes verbs, options, choices and
keys of a recipe.

The script holds all of it, so that a Tab starts no Python.
"""

import argparse

from launcher.cli.options import SHELLS, VERBS
from launcher.config.recipe import RunConfig, known_keys

BASH = """\
# clip-train's completion: verbs, options, keys of a recipe
_clip_train() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" words="" file="" keys="{keys}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
        esac
    fi
    [ -n "$cur" ] || [ -z "$file" ] || words=""  # nothing typed: files
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    case "${{COMPREPLY[*]}}" in *=) compopt -o nospace 2> /dev/null || true ;; esac
}}
complete -o default -F _clip_train clip-train
"""
ZSH = """\
(( $+functions[compdef] )) || {{ autoload -U +X compinit && compinit }}
autoload -U +X bashcompinit && bashcompinit
""" + BASH.replace("-o default", "-o default -o nospace")  # it has no compopt


def run(args: argparse.Namespace) -> int:
    """Print the script of `args.shell`."""
    # completions for arguments that are not file names
    offered = {
        "overrides": ["$keys"],
        "shell": [*SHELLS],
        "prefix?": [f"{name}." for name in RunConfig.model_fields],
    }
    cases = []
    for name, verb in VERBS.items():
        for option, metavar, *_ in verb.options:
            if isinstance(metavar, list):
                cases.append(f'"{name} --{option}") words="{" ".join(metavar)}" ;;')
        words = [f"--{option}" for option, *_ in verb.options] + ["--help"]
        words += [word for position in verb.positions for word in offered.get(position, [])]
        file = "" if set(verb.positions) <= offered.keys() else "file=1 "
        cases.append(f'"{name} "*) {file}words="{" ".join(words)}" ;;')
    keys = " ".join(f"{key}=" for key, _ in known_keys())
    script = ZSH if args.shell == "zsh" else BASH
    lines = "\n".join(f"            {case}" for case in cases)
    print(script.format(keys=keys, verbs=" ".join(VERBS), cases=lines), end="")
    return 0
