"""`clip-train keys [PREFIX]`: every key that a recipe can hold, one line each, or as a page.

With `loss.kind=my_package.losses.margin` as PREFIX: the options of that function or class.
"""

import argparse
import inspect
import itertools

from clip_train.errors import UserError
from launcher.cli.arguments import add_help

PAGE = """\
# Every key of a recipe

Printed by `clip-train keys --markdown`, from the code that checks recipes. On a command line:
`section.key=value`. In a path or URL, `~`, `$NAME` and `${NAME}` are replaced as a shell would;
a variable that is not set is a mistake.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        "Print one line for each key: its default, its allowed values and its meaning.",
        """
        clip-train keys                                         all of them
        clip-train keys optim                                   those that begin with it
        clip-train keys loss.kind=my_package.losses.margin      the options of that function or class
        clip-train keys --markdown > docs/recipe.md             the page of the documentation
        """,
    )
    parser.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="a section, or how a key begins"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="as a page with a table for each section"
    )


def run(prefix: str, markdown: bool) -> int:
    from clip_tools.keys import row_of
    from clip_train.recipe.recipe import SECTIONS, known_keys, nearest
    from clip_train.settings import POSITIONAL, options_key, options_model

    prefix, _, path = prefix.partition("=")
    rows = [row_of(name, field) for name, field in known_keys() if name.startswith(prefix)]
    if path and prefix in POSITIONAL:
        rows = [
            (
                f"{options_key(prefix)}.{name}",
                "required" if field.is_required() else repr(field.get_default()),
                inspect.formatannotation(field.annotation),
                field.description or "",
            )
            for name, field in options_model(prefix, path).model_fields.items()
        ]
    if not rows:
        raise UserError(f"no key starts with {prefix}; {nearest(prefix)}")
    if not markdown:
        for name, default, allowed, meaning in rows:
            print(f"{name}\t{default}\t{allowed}. {meaning}")
        return 0
    print(PAGE, end="")  # docs/recipe.md
    for section, its in itertools.groupby(rows, key=lambda row: row[0].split(".")[0]):
        about = (SECTIONS[section].__doc__ or "").partition("\n\n")[0]
        print(f"\n## {section}\n\n{' '.join(about.split())}\n")
        print("| Key | Default | May be | Meaning |\n|---|---|---|---|")
        for name, default, *words in its:
            escaped = [word.replace("<", "&lt;").replace("*", "\\*") for word in words]
            cells = [f"`{name}`", f"`{default}`", *escaped]
            print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return 0
