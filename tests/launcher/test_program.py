"""A Python program that trains: `clip_train.train` with objects in place of import paths."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from functools import partial

import pytest

import clip_train
from clip_train.settings import given, import_path, options_model
from clip_train.stop import SIGNALS
from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.launcher.conftest import ROOT, clean_environment, finish, free_port, metrics, run
from tests.warm import Command, World, call

SHORT = ("run.steps=4", "schedule.warmup_steps=0")
PROGRAM = ROOT / "examples" / "own_run.py"


def become_program():
    """In a new process: what `python examples/own_run.py ARGUMENTS` does."""
    sys.argv[0] = str(PROGRAM)
    runpy.run_path(str(PROGRAM), run_name="__main__")


def become_two_runs():
    recipe, *overrides = sys.argv[1:]
    for name in ("first", "second"):
        clip_train.train(recipe, [*overrides, f"run.dir={name}"])


def program(recipe, *overrides, ranks=1, target=become_program):
    """examples/own_run.py as a shell starts it, or a launcher its ranks: exit status, output."""
    env = clean_environment() | {"PYTHONPATH": str(ROOT)}
    line = [str(recipe), *overrides]
    if ranks == 1:
        return finish(Command(line, env=env, cwd=recipe.parent, target=target))
    world = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    commands = []
    for rank in range(ranks):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        commands.append(Command(line, env=env | world | here, cwd=recipe.parent, target=target))
    return finish(World(commands))


@pytest.mark.engine
def test_objects_of_a_program_train_as_the_recipe_would(recipe, tmp_path):
    status, out = run(recipe, *SHORT, "run.dir=command")
    assert status == 0, out
    status, out = program(recipe, *SHORT, "run.dir=objects", "data.workers=1", ranks=2)
    assert status == 0, out
    losses = [line["loss"] for line in metrics(tmp_path / "objects")]
    known = [line["loss"] for line in metrics(tmp_path / "command")]
    assert losses == pytest.approx(known, rel=tolerances.loss(4))
    assert out.count(f"the lowest loss was {min(losses):.6f}") == 2
    # a resume finds the same loss, and another one is another run
    status, out = program(recipe, *SHORT, "run.dir=objects", "run.steps=5")
    assert status == 0 and "resuming from step 4" in out, out
    status, out = run(recipe, *SHORT, "run.dir=objects", "run.steps=6")
    assert status == 2 and "loss.kind was 'own_run.margin_loss', is 'info_nce'" in out, out


def test_a_mistake_ends_a_program_with_the_commands_status(recipe):
    status, out = program(recipe, "optim.learning_rate=1")
    assert status == 2 and "did you mean optim.lr?" in out, out


class Constant(clip_train.Objective):
    """An objective that a refused run never calls."""

    def __call__(self, features, context=None):
        raise AssertionError("the run was not refused")


def train_with(recipe, overrides, objects):
    try:
        clip_train.train(recipe, [*SHORT, *overrides, "engine.kind=plain"], **objects)
    except SystemExit as e:
        return e.code, str(e.__cause__)


@pytest.mark.parametrize(
    ("overrides", "objects", "message"),
    [
        (["loss.kind=sigmoid"], {"loss": Constant()}, "loss.kind is given twice"),
        (["loss.options.margin=1"], {"loss": Constant()}, "Constant) is an object; take them out"),
        ([], {"loss": "sigmoid"}, "loss.kind ('sigmoid') must be an object here"),
        ([], {"callbacks": [clip_train.Callback]}, "must be objects of subclasses"),
    ],
)
def test_objects_that_cannot_be_used_are_refused(recipe, overrides, objects, message):
    status, error = call(train_with, recipe, overrides, objects)
    assert status == 2 and message in error


def train_with_a_lambda(recipe):
    return train_with(recipe, [], {"loss": lambda image, text, scale, bias, rows: 0})


def test_what_no_other_process_could_find_is_refused(recipe):
    status, message = call(train_with_a_lambda, recipe)
    assert status == 2 and "is defined within a function" in message


def test_every_promised_name_exists_and_is_imported_when_used():
    lines = (
        "import sys, clip_train",
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules",
        "print(all(getattr(clip_train, name) for name in clip_train.__all__))",
    )
    out = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=True, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert out.stdout.strip() == "True", out.stderr


def margin(image, text, scale, bias, rows, *, margin=0.0):
    return image.sum()


def width(*, width=8):
    return width


def test_each_object_is_found_under_its_own_key():
    model, loss = partial(width, width=16), partial(margin, margin=0.5)
    paths = given({"model.name": model, "loss.kind": loss})
    assert paths == {"model.name": f"{__name__}.width", "loss.kind": f"{__name__}.margin"}
    assert import_path("model.name", paths["model.name"]) is model
    assert import_path("loss.kind", paths["loss.kind"]) is loss
    assert set(options_model("loss.kind", paths["loss.kind"]).model_fields) == {"margin"}
    # in a later run of the same process, only its own objects count
    assert given({"loss.kind": partial(width)}) == {"loss.kind": f"{__name__}.width"}
    assert import_path("loss.kind", paths["loss.kind"]) is margin
    assert not options_model("loss.kind", f"{__name__}.width").model_fields
    given({})
    assert import_path("loss.kind", f"{__name__}.width") is width


def test_an_object_of_a_module_that_python_runs_has_its_path(tmp_path):
    lines = (
        "from clip_train.settings import given",
        "class Loss: pass",
        "print(given({'loss.kind': Loss})['loss.kind'])",
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text("\n".join(lines))
    for line, path in (
        (["-m", "package.program"], "package.program.Loss"),
        (["package/program.py"], "program.Loss"),
    ):
        out = subprocess.run(
            [sys.executable, *line],
            check=True, capture_output=True, text=True, cwd=tmp_path,
            env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert out.stdout.strip() == path, out.stderr


class Stubborn(clip_train.Callback):
    def close(self):
        raise ValueError("it does not close")


def train_twice(recipe):
    def handlers():
        return [signal.getsignal(number) for number in SIGNALS]

    before, callbacks, skipped = handlers(), [Stubborn()], []
    for folder in (recipe.parent / "first", recipe.parent / "second"):
        clip_train.train(
            recipe, [*SHORT, f"run.dir={folder}", "engine.kind=plain"], callbacks=callbacks
        )
        assert handlers() == before
        _, why = read_verdict(folder)
        skipped.append(why.get("skipped"))
    return skipped


@pytest.mark.engine
def test_a_program_continues_after_a_run_as_it_was(recipe):
    first, second = call(train_twice, recipe)
    assert len(first) == 1 and "it does not close" in first[0]
    assert second == first


@pytest.mark.engine
@pytest.mark.parametrize(
    ("ranks", "message"), [(1, "trains one run in a process"), (2, "several ranks meet once")]
)
def test_a_second_run_that_cannot_be_is_refused(recipe, ranks, message):
    status, out = program(recipe, *SHORT, ranks=ranks, target=become_two_runs)
    assert status != 0 and message in out, out
    assert (recipe.parent / "first" / "VERDICT").read_text().startswith("DONE")
