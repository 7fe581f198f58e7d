"""`submit --to kubernetes --dry-run`: a JobSet whose fields and types are those of its published schema.

The whole output was validated against kubernetes-sigs/jobset's CRD (v1alpha2 of 2026-08-18), every unknown field an
error. Here are the parts that matter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from clip_train.errors import Preempted, UserError
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main
from launcher.kubernetes import WORK, resource_name

SITE = """\
gpus_per_node: 8
kubernetes: {claims: {datasets: /data, runs: /work}, secrets: [s3], node_selector: {gpu: h100}}
"""
# Messages of Kubernetes' job controller (pkg/controller/job/pod_failure_policy.go).
EXITED = "Container trainer for pod ns/a-nodes-0-1-x failed with exit code {} matching FailJob rule at index 0"
DISRUPTED = "Pod ns/a-nodes-0-1-x has condition DisruptionTarget matching FailJob rule at index 2"


@pytest.fixture
def here(tmp_path, monkeypatch, recipe) -> Path:
    (tmp_path / "site.yaml").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIP_TRAIN_SITE", str(tmp_path / "site.yaml"))
    return tmp_path


def submit(capsys, *options: str) -> tuple[int, list, str]:
    line = ["submit", "recipe.yaml", "run.dir=runs/a", "run.name=My_run", "--to=kubernetes"]
    status = main([*line, *options])
    told = capsys.readouterr()
    return status, [*yaml.safe_load_all(told.out)], told.err


def test_each_pod_is_a_node_that_finds_the_first_one(here, tmp_path, capsys):
    status, (recipe, jobset), err = submit(
        capsys, "--dry-run", "--nodes=2", "--container=me/clip:1", "batch.global_size=64"
    )
    assert status == 0, err
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (
        jobset["metadata"]["name"] == "my-run" and jobset["spec"]["network"]["enableDNSHostnames"]
    )
    (nodes,) = jobset["spec"]["replicatedJobs"]
    job = nodes["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else podFailurePolicy is refused
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["nodeSelector"] == {"gpu": "h100"}
    (container,) = pod["containers"]
    assert container["image"] == "me/clip:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    # <jobset>-<replicated job>-<job>-<pod>.<jobset>: site/content/en/docs of JobSet
    assert (
        f"--master={jobset['metadata']['name']}-{nodes['name']}-0-0.my-run:29500"
        in container["args"]
    )
    assert {"--nodes=2", "--ranks=8", "--node-rank=$(NODE_RANK)"} <= set(container["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    kinds = {mounts[volume.pop("name")]: volume for volume in pod["volumes"]}
    assert kinds == {
        "/etc/clip-train": {"configMap": {"name": "my-run-recipe"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        "/data": {"persistentVolumeClaim": {"claimName": "datasets"}},
        "/work": {"persistentVolumeClaim": {"claimName": "runs"}},
    }
    assert recipe["metadata"]["name"] == "my-run-recipe"
    (tmp_path / "inside.yaml").write_text(recipe["data"]["recipe.yaml"])
    assert load_config("inside.yaml", []).run_dir == WORK / "runs" / "a"


def test_the_recipe_in_the_job_can_be_read_and_edited(here, capsys):
    line = ["recipe.yaml", "run.dir=runs/a", "--to=kubernetes", "--dry-run"]
    assert main(["submit", *line, "--container=me/clip:1"]) == 0
    assert "\n  recipe.yaml: |\n    run:\n      name: " in capsys.readouterr().out


def action(jobset: dict, status: int | None) -> str:
    """What the JobSet's controller does when a container has ended so; None: its node was drained."""
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule["action"] == "FailJob"
        if status in rule.get("onExitCodes", {}).get("values", []):
            reason, message = "PodFailurePolicy", EXITED.format(status)
            break
        if status is None and "onPodConditions" in rule:
            reason, message = "PodFailurePolicy", DISRUPTED
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(
            re.search(each, message) for each in patterns
        ):
            return rule["action"]
    return "RestartJobSet"  # the default, which counts


def test_an_exit_status_decides_what_follows(here, capsys):
    status, (_, jobset), err = submit(capsys, "--dry-run", "--container=a", "--gpus-per-node=1")
    assert status == 0, err
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert action(jobset, UserError.exit_status) == "FailJobSet"
    assert action(jobset, Preempted.exit_status) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(jobset, None) == "RestartJobSetAndIgnoreMaxRestarts"
    for status in (1, 137):
        assert action(jobset, status) == "RestartJobSet"


@pytest.mark.parametrize(
    "options, said",
    [
        (["--container=a"], "--to kubernetes submits nothing: add --dry-run"),
        (["--dry-run"], "needs --container IMAGE"),
        (["--dry-run", "--container=a", "--nodes=9"], "global_size (32) must be"),
        (["--dry-run", "--container=a", "checkpoint.resume=never"], "every start would be from step 0"),
        (["--dry-run", "--container=a", "run.dir=/scratch/a"], "is lost with its pod"),
        (["--dry-run", "--container=a", "--tasks-per-node=4"], "--tasks-per-node (4) must be --gpus-per-node (8)"),
        (["--dry-run", "--container=a", "--gpus-per-node=0"], "--gpus-per-node (0) is a job on CPUs"),
        (["--dry-run", "--container=a", "--", "--qos=high"], "options of sbatch (--qos=high) have no meaning"),
        (["--dry-run", "--container=a", "data.val=https://me:word@host/0.tar"], "a ConfigMap is not secret"),
    ],
)  # fmt: skip
def test_what_would_fail_in_the_cluster_is_refused(here, capsys, options, said):
    status, _, err = submit(capsys, *options)
    assert status == 2 and said in err


def test_a_store_can_stand_in_for_a_volume(here, capsys):
    (here / "site.yaml").write_text("gpus_per_node: 1\n")
    line = ["--dry-run", "--container=a"]
    assert submit(capsys, *line)[0] == 2
    assert submit(capsys, *line, "checkpoint.remote=s3://bucket/a")[0] == 0


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "{claims: {runs: work}}",
            "claims ({runs: work}) must be names of claims with absolute paths",
        ),
        ("{claims: {My_runs: /work}}", "must be names of claims with absolute paths"),
        ("{secrets: [S3_keys]}", "must be names of Secrets"),
        (
            "{shared_memory: 16GB}",
            "shared_memory ('16GB') must be a quantity of Kubernetes, such as 16Gi",
        ),
        (
            "{node_selector: {gpu: true}}",
            "node_selector ({gpu: true}) must be labels whose values are texts",
        ),
    ],
)
def test_what_the_cluster_would_refuse_is_a_mistake_of_the_site_file(here, capsys, text, said):
    (here / "site.yaml").write_text(f"kubernetes: {text}\n")
    status, _, err = submit(capsys, "--dry-run", "--container=a")
    assert status == 2 and said in err, err


def test_keys_that_only_slurm_reads_are_named(here, capsys):
    (here / "site.yaml").write_text(f"{SITE}setup: [export NCCL_DEBUG=INFO]\n")
    status, _, err = submit(capsys, "--dry-run", "--container=a", "--partition=gpu")
    assert (
        status == 0 and "does not use partition, setup of the site file or the command line" in err
    )


def test_runs_of_different_names_are_different_jobs():
    """`kubectl apply` would give the recipe of one to the other, which takes it when it starts again."""
    long = "vit-l14-datacomp-large-batch-with-a-schedule"
    names = [
        f"{long}-lr1e-3",
        f"{long}-lr5e-4",
        "\u6a21\u578b1",
        "\u7248\u672c1",
        "on",
        "1",
        "My_run",
    ]
    found = [resource_name(name) for name in names]
    assert len({*found}) == len(names) and found[-3:] == ["on", "run-1", "my-run"]
    for name in found:
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", name)


def test_a_label_that_yaml_takes_for_a_boolean_stays_a_text(here, capsys):
    """Kubernetes' reader takes y and n for booleans, too."""
    labels = ["y", "N", "on", "yes", "true", "1", "1e3", "null"]
    (here / "site.yaml").write_text(
        f"{SITE.replace('gpu: h100', ', '.join(f'l{i}: {label!r}' for i, label in enumerate(labels)))}"
    )
    line = [
        "submit",
        "recipe.yaml",
        "run.dir=runs/a",
        "--to=kubernetes",
        "--dry-run",
        "--container=a",
    ]
    assert main(line) == 0
    out = capsys.readouterr().out
    for i, label in enumerate(labels):
        assert f" l{i}: '{label}'\n" in out
