"""The sets that `clip-train evaluate --linear-probe` fits and tests a probe on."""

from collections.abc import Sequence
from dataclasses import replace

from clip_train.data.benchmark import training_split
from clip_train.errors import UserError
from clip_train.evaluate.data_sets import EvaluationSet
from clip_train.places import expanded


def with_probes(sets: Sequence[EvaluationSet], options: Sequence[str]) -> list[EvaluationSet]:
    """The sets, each with the training images that an option of `--linear-probe` gives for it.
    UserError."""
    names = [data_set.name for data_set in sets if data_set.classes is not None]
    training: dict[str, str] = {}
    for option in options:
        name, equals, place = option.partition("=")
        if not equals or name not in names:
            name, place = only_set(names, option), option
        training[name] = training_split(expanded(place))
    probed = []
    for data_set in sets:
        if data_set.classes is not None and data_set.name in training:
            data_set = replace(data_set, train=training[data_set.name])  # noqa: PLW2901
        probed.append(data_set)
    return probed


def only_set(names: list[str], option: str) -> str:
    """The set with classes for an option without a name: evaluate.zero_shot_data, or data.val, whose
    name is empty, or the only one of evaluate.sets. UserError."""
    if "" in names:
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
