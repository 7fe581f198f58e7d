"""`clip-train completion SHELL`: a script by which the shell completes verbs, options, choices and keys of a recipe.

The script holds all of it, so that a Tab starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from launcher.cli.keys import all_keys
from launcher.cli.options import SHELLS, VERBS, Verb

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
    print(fish() if args.shell == "fish" else bash(ZSH if args.shell == "zsh" else BASH), end="")
    return 0


def bash(script: str) -> str:
    cases = []
    for name, verb in VERBS.items():
        for option, metavar, *_ in verb.options:
            if isinstance(metavar, list):
                cases.append(f'"{name} --{option}") words="{" ".join(metavar)}" ;;')
        words = [f"--{option}" for option, *_ in verb.options] + ["--help"]
        words += ["$keys"] * takes_keys(verb) + positions(verb)
        file = "" if {"shell", "prefix?"} & set(verb.positions) or verb.positions == ("overrides",) else "file=1 "
        cases.append(f'"{name} "*) {file}words="{" ".join(words)}" ;;')
    keys = " ".join(f"{key.name}=" for _, _, keys in all_keys("") for key in keys)
    return script.format(keys=keys, verbs=" ".join(VERBS), cases="\n".join(f"            {case}" for case in cases))


def fish() -> str:
    return "".join(f"complete -c clip-train {line}\n" for line in _fish_lines())


def _fish_lines() -> Iterator[str]:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    for name, verb in VERBS.items():
        yield f"-n __fish_use_subcommand -f -a {name} -d {quoted(verb.help)}"
        of_verb = f"-n '__fish_seen_subcommand_from {name}'"
        for option, metavar, text, *_ in verb.options:
            takes = "" if metavar is None else f"-x -a '{' '.join(metavar)}'" if isinstance(metavar, list) else "-r"
            yield " ".join(filter(None, (of_verb, "-l", option, takes, "-d", quoted(text))))
        for word in positions(verb):
            yield f"{of_verb} -f -a {word}"
    with_keys = " ".join(name for name, verb in VERBS.items() if takes_keys(verb))
    for _, _, keys in all_keys(""):
        for key in keys:
            meaning = quoted(key.meaning.partition(". ")[0])
            yield f"-n '__fish_seen_subcommand_from {with_keys}' -a '{key.name}=' -d {meaning}"


def takes_keys(verb: Verb) -> bool:
    return "overrides" in verb.positions


def positions(verb: Verb) -> list[str]:
    """Words that stand where no file does."""
    if "shell" in verb.positions:
        return list(SHELLS)
    return [f"{section}." for section, _, _ in all_keys("")] if "prefix?" in verb.positions else []
