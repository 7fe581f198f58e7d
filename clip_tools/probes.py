"""The sets that `clip-train evaluate --linear-probe` fits and tests a probe on."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from clip_train.data.benchmark import training_split
from clip_train.errors import UserError, unreadable
from clip_train.evaluate.data_sets import EvaluationSet
from clip_train.places import expanded
from clip_train.storage.redact import redact


def with_probes(sets: Sequence[EvaluationSet], options: Sequence[str]) -> list[EvaluationSet]:
    """The sets, each with the training images that an option of `--linear-probe` gives for it.
    UserError; RankError if a store does not answer."""
    names = [data_set.name for data_set in sets if data_set.classes is not None]
    training: dict[str, str] = {}
    for option in options:
        name, place = named_place(names, option)
        if not place:
            raise UserError(f"--linear-probe ({option}) names no images; add their place")
        if name in training:
            raise UserError(
                f"--linear-probe ({option}): {name or 'this set'} has one already; remove one"
            )
        try:
            training[name] = training_split(expanded(place))
        except OSError as e:
            raise unreadable(e, f"--linear-probe ({redact(place)}) cannot be read: {e}") from e
    probed = []
    for data_set in sets:
        if data_set.classes is not None and data_set.name in training:
            data_set = replace(data_set, train=training[data_set.name])  # noqa: PLW2901
        probed.append(data_set)
    return probed


def named_place(names: list[str], option: str) -> tuple[str, str]:
    """The set and the images of NAME=PLACE, or of PLACE alone if there is only one set.
    UserError."""
    name, equals, place = option.partition("=")
    if equals and name in names:
        return name, place
    # the text before = is a name, unless it is the start of a path or URL
    is_name = equals and not set("/\\:") & set(name)
    if is_name and any(names):
        near = get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "correct the name."
        raise UserError(
            f"--linear-probe ({option}): {name} is not a set with classes "
            f"({', '.join(filter(None, names))}); {remedy} A path with = in it begins with ./"
        )
    return only_set(names, option), option


def only_set(names: list[str], option: str) -> str:
    """The set with classes for an option without a name. UserError."""
    if "" in names:  # evaluate.zero_shot_data or data.val, which have no name
        return ""
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(
            f"--linear-probe ({option}) needs images to test on, with classes: add "
            "evaluate.sets.NAME.data=<images> evaluate.sets.NAME.classes=<classes>"
        )
    raise UserError(
        f"--linear-probe ({option}): there are several sets with classes ({', '.join(names)}); name "
        f"one, as in --linear-probe {names[0]}={option}"
    )
