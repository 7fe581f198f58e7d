"""`clip-train keys [PREFIX]`: every key that a recipe can hold, one line each, or as a page.

With `loss.kind=my_package.losses.margin` as PREFIX: the options of that function or class.
"""

import argparse
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
    from clip_tools.keys import key_rows, option_rows
    from clip_train.recipe.recipe import SECTIONS, nearest
    from clip_train.settings import POSITIONAL

    key, _, import_path = prefix.partition("=")
    # POSITIONAL has the keys whose value may be a function or a class
    if import_path and key in POSITIONAL:
        rows = option_rows(key, import_path)
    else:
        rows = key_rows(key)
    if not rows:
        raise UserError(f"no key starts with {key}; {nearest(key)}")
    if not markdown:
        for row in rows:
            print(f"{row.name}\t{row.default}\t{row.allowed}. {row.meaning}")
        return 0
    # this output is docs/recipe.md
    print(PAGE, end="")
    for section, section_rows in itertools.groupby(rows, key=lambda row: row.section):
        about = (SECTIONS[section].__doc__ or "").partition("\n\n")[0]
        print(f"\n## {section}\n\n{' '.join(about.split())}\n")
        print("| Key | Default | May be | Meaning |\n|---|---|---|---|")
        for row in section_rows:
            cells = [
                f"`{row.name}`",
                f"`{escape_bars(row.default)}`",
                escape(row.allowed),
                escape(row.meaning),
            ]
            print(f"| {' | '.join(cells)} |")
    return 0


def escape(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return escape_bars(text.replace("<", "&lt;").replace("*", "\\*"))


def escape_bars(text: str) -> str:
    """The same for code, in which only `|` has a meaning."""
    return text.replace("|", "\\|")
