"""`clip-train evaluate`: the metrics of a run, or of any weights, without the run's engine."""

import argparse
import json

from clip_train.errors import UserError
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_json,
    add_overrides,
    add_place,
    add_step,
    add_weights,
)
from launcher.cli.process import Process
from launcher.runtime.log import log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Evaluate on data.val, evaluate.zero_shot_data and evaluate.sets: docs/evaluation.md. With a URL or a
        bare folder of checkpoints, the recipe comes from the checkpoint. PLACE may also be weights
        (an exported folder, hf-hub:org/name, open_clip:NAME/TAG; a file with model.name=NAME).
        """,
        """
        clip-train evaluate my.yaml                             the newest checkpoint of that run
        clip-train evaluate my.yaml --weights runs/clip/export data.val='val/*.tar'
        clip-train evaluate open_clip:ViT-B-32/openai data.val='val/*.tar'
        clip-train evaluate runs/clip evaluate.sets.cars.data=/data/wds_cars --linear-probe cars=/data/wds_cars
        """,
    )
    add_place(parser)
    add_overrides(parser)
    add_weights(parser, "an exported folder or weights instead of the run's newest checkpoint")
    add_step(parser)
    add_ema(parser)
    parser.add_argument(
        "--linear-probe",
        metavar="[NAME=]TRAIN",
        action="append",
        default=[],
        help="fit logistic regression on the image features of these labeled images, and test it on "
        "this set of evaluate.sets (can be repeated); without a name, on the images of "
        "evaluate.zero_shot_classes, or on the only set with classes",
    )
    add_json(parser)


def run(
    place: str,
    overrides: list[str],
    weights: str | None,
    step: int | None,
    ema: bool,
    linear_probe: list[str],
    as_json: bool,
    process: Process,
) -> int:
    """Print the metrics of `clip_train.evaluate`; under torchrun the samples are split over the
    ranks.
    """
    from clip_tools.place import weights_at
    from clip_tools.probes import with_probes
    from clip_train import dist
    from clip_train.engines.base import PlainEngine
    from clip_train.evaluate.data_sets import evaluation_sets
    from clip_train.evaluate.sets import evaluation
    from clip_train.models.clip import build_model
    from clip_train.recipe.resolve import check_set
    from clip_train.recipe.tokenizer import tokenizer_of

    with process.as_rank() as device:
        found = weights_at(place, overrides, weights, step, ema)
        config = found.config
        sets = dist.on_main(evaluation_sets, config)
        sets = dist.on_main(with_probes, sets, linear_probe)
        for data_set in sets:
            dist.on_main(check_set, data_set)
        model = build_model(found.architecture)
        PlainEngine(model).load_fragments(found.source, {})
        tokenizer = dist.agreed(tokenizer_of, found.architecture)
        engine = PlainEngine(model.to(device))
        evaluate_once = evaluation(config, found.architecture, engine, tokenizer, sets)
        if evaluate_once is None:
            raise UserError(
                "data.val, evaluate.zero_shot_data and evaluate.sets are null, so nothing can be "
                "evaluated; add data.val=<shards>, or evaluate.sets.NAME.data=<shards or folder> "
                "evaluate.sets.NAME.classes=imagenet"
            )
        results = evaluate_once()
        if dist.is_main() and as_json:
            print(json.dumps({"name": config.run.name, "weights": found.where, **results}))
        elif dist.is_main():
            log(f"{config.run.name}, {found.where}:")
            for name, value in results.items():
                print(f"{name}: {value:.6g}")
    return 0
