"""`clip-train completion SHELL`: a script with which the shell completes verbs, options, choices and
keys. The script contains all of these, so pressing Tab does not start Python.
"""

import argparse
from collections.abc import Mapping

from launcher.cli.arguments import add_help
from launcher.cli.main import VERBS, verb_parser

SHELLS = ("bash", "zsh")
# What is offered for positional arguments that are not files. `prefix`: the sections of a recipe.
OFFERED = {
    "overrides": ["$keys"],
    "shell": [*SHELLS],
}
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        "Print a script for bash or zsh that completes verbs, options and recipe keys.",
        """
        clip-train completion bash > ~/.local/share/bash-completion/completions/clip-train
        clip-train completion zsh > ~/.clip-train.zsh           in .zshrc: source ~/.clip-train.zsh
        """,
    )
    parser.add_argument(
        "shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}"
    )


def run(shell: str) -> int:
    """Print the script."""
    from clip_train.recipe.recipe import SECTIONS, known_keys

    offered = {**OFFERED, "prefix": [f"{name}." for name in SECTIONS]}
    script = (ZSH if shell == "zsh" else BASH).format(
        keys=" ".join(f"{key}=" for key, _ in known_keys()),
        verbs=" ".join(VERBS),
        cases="\n".join(f"            {case}" for verb in VERBS for case in cases(verb, offered)),
    )
    print(script, end="")
    return 0


def cases(verb: str, offered: Mapping[str, list[str]]) -> list[str]:
    """The lines of the script for one verb: the choices of its options, then the verb itself.

    offered: by the name of a positional argument that is not a file, its words."""
    lines, words = [], []
    takes_files = False
    for action in verb_parser(verb)._actions:
        if not action.option_strings:
            words += offered.get(action.dest, [])
            takes_files = takes_files or action.dest not in offered
            continue
        option = action.option_strings[-1]  # --help, not -h
        words.append(option)
        if action.choices:
            lines.append(f'"{verb} {option}") words="{" ".join(action.choices)}" ;;')
    file = "file=1 " if takes_files else ""
    return [*lines, f'"{verb} "*) {file}words="{" ".join(words)}" ;;']
