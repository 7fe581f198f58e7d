"""`clip-train submit`: check the job, freeze recipe and code, and give the script to sbatch."""

import argparse
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, add_overrides, add_recipe, path_or_url
from launcher.runtime.log import warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # its options are the fields of `Site`
    from launcher.slurm.profile import add_site_options

    add_help(
        parser,
        """
        Check everything that would fail after hours in the queue, freeze recipe and code beside the
        batch script, and hand it to sbatch. The job requeues itself until it is done, or gives up:
        docs/slurm.md. Options after -- are sbatch's own.
        """,
        """
        clip-train submit recipes/vit_l14.yaml --nodes 4 --time 24:00:00 --dry-run   look first
        clip-train submit recipes/vit_l14.yaml --nodes 4 --partition gpu run.name=l14
        clip-train submit recipes/vit_l14.yaml --nodes 4 --container clip-train.sif
        clip-train submit recipes/vit_l14.yaml --nodes 4 --to kubernetes --container IMAGE --dry-run
        clip-train submit recipes/vit_l14.yaml --nodes 4 -- --constraint=a100
        """,
    )
    add_recipe(parser)
    add_overrides(parser)
    add_site_options(parser)
    parser.add_argument(
        "--site",
        metavar="FILE",
        type=path_or_url,
        help="the site's defaults (default: $CLIP_TRAIN_SITE, ~/.config/clip-train/site.yaml)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check, print the batch script, and submit nothing",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="skip the checks of shards and checkpoint.remote",
    )


def run(
    recipe: str,
    overrides: list[str],
    site: str | None,
    dry_run: bool,
    offline: bool,
    sbatch_options: list[str],
    **options: Any,
) -> int:
    """Print the script (--dry-run), or write, freeze and submit it.

    sbatch_options: what follows `--` on the command line. options: those of `add_site_options`.
    """
    from clip_train.places import shipped
    from clip_train.recipe.recipe import load_config, with_samples
    from clip_train.yaml_text import load_yaml
    from launcher.runtime.verdict import STOP_FILE
    from launcher.slurm.container import container_words
    from launcher.slurm.profile import load_site
    from launcher.slurm.scheduler import OUTAGE, run_command
    from launcher.slurm.submit import check_submission, freeze, frozen_recipe, render

    config = with_samples(load_config(recipe, overrides))
    job = load_site(site, options)
    if job.to == "kubernetes":
        from launcher.kubernetes import check_jobset, manifests

        check_jobset(config, job, dry_run=dry_run, sbatch_options=sbatch_options)
        print(manifests(config, job), end="")
        return 0
    run_dir, base = config.run_dir.absolute(), Path.cwd()
    number = 1 + len(list(run_dir.glob("submit/*/submit.json")))
    folder = run_dir / "submit" / f"{number:04d}"
    template = (shipped("slurm") / f"{job.template}.sbatch").read_text()
    frozen = frozen_recipe(config, base)
    script = render(
        template,
        job,
        name=config.run.name,
        folder=folder,
        options=sbatch_options,
        container=container_words(job, load_yaml(frozen)),
    )
    if dry_run:
        print(script, end="", flush=True)  # also if a check refuses it
    check_submission(config, job, offline=offline)
    if dry_run:
        error = ""
        if shutil.which("sbatch") is not None:
            error = run_command("sbatch", "--test-only", stdin=script).error
        if error and not OUTAGE.search(error):
            raise UserError(f"sbatch --test-only refuses this script: {error}")
        if error:
            warn(f"sbatch --test-only could not ask the cluster: {' '.join(error.split())}")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch was not found on this machine: run submit on a login node, or show the "
            "script with --dry-run"
        )
    described = freeze(folder, script, frozen, job)
    sent = subprocess.run(
        ["sbatch", "--parsable", str(folder / "job.sbatch")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if sent.returncode:
        raise UserError(f"sbatch refused {folder / 'job.sbatch'}: {sent.stderr.strip()}")
    identity = sent.stdout.strip().split(";")[0]
    (folder / "submit.json").write_text(json.dumps(described | {"job": identity}, indent=2) + "\n")
    log = shlex.quote(f"{folder}/{config.run.name}-{identity}") + "*.log"
    shown, stop_file = (shlex.quote(str(place)) for place in (run_dir, run_dir / STOP_FILE))
    print(
        f"job {identity}: {job.nodes} nodes x {job.tasks} ranks, {job.time}, from {folder}",
        f"watch:   clip-train watch {shown}; squeue -j {identity}; tail -F {log}",
        f"history: {run_dir / 'attempts.jsonl'}",
        f"stop:    touch {stop_file}   (saves first)",
        f"cancel:  scancel {identity}   (saves if Slurm lets it)",
        sep="\n",
    )
    return 0
