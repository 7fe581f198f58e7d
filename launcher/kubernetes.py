"""A job as a JobSet of Kubernetes: one pod for each node, which starts a rank on each of its GPUs.

`submit --to kubernetes --dry-run` prints it. The pods find each other by the JobSet's headless
service. Their exit statuses are the trainer's own, and decide whether the JobSet starts again.
"""

import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clip_train.errors import Preempted, UserError, raise_all
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.resolve import resolve
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote
from clip_train.yaml_text import dump_yaml
from launcher.runtime.log import warn
from launcher.slurm.profile import Site
from launcher.slurm.submit import frozen_recipe, mistakes_in_tasks

PORT = 29500  # where rank 0 listens; each pod has an address of its own
WORK = Path("/work")  # the image's folder (container/Dockerfile)
RECIPE = Path("/etc/clip-train")
USER = 10001  # the image's user, who must be able to write into the volumes
CONTAINER, NODES = "trainer", "nodes"
LONGEST_NAME = 40  # of 63 that a label has
# Exit statuses of the trainer; 1 is any other error.
MISTAKE, PREEMPTED = UserError.exit_status, Preempted.exit_status


# Keys of the site file that belong to Slurm alone.
OF_SLURM = (
    "account", "container_mounts", "container_runtime", "partition", "sbatch", "setup", "template", "time",
)  # fmt: skip


def check_jobset(
    config: Recipe, job: Site, *, dry_run: bool, sbatch_options: Sequence[str] = ()
) -> None:
    """Find what would fail in the cluster, as far as this machine can see. UserError."""
    problems: list[str | UserError] = []
    if sbatch_options:
        problems.append(
            f"options of sbatch ({shlex.join(sbatch_options)}) have no meaning with --to kubernetes; "
            "leave them out"
        )
    unused = sorted(job.model_fields_set & {*OF_SLURM})
    if unused:
        warn(
            f"--to kubernetes does not use {', '.join(unused)} of the site file or the command line; "
            "variables of the ranks come from a Secret (kubernetes.secrets) or from the image"
        )
    if not dry_run:
        problems.append(
            "--to kubernetes submits nothing: add --dry-run, and give what it prints to "
            "`kubectl apply -f FILE`"
        )
    if job.container is None:
        problems.append("--to kubernetes needs --container IMAGE, a name in a registry")
    problems += mistakes_in_tasks(job)
    if job.tasks:
        try:
            resolve(config, job.nodes * job.tasks, read_data=False)
        except UserError as e:
            problems.append(e)
    if config.checkpoint.resume == "never":
        problems.append(
            "checkpoint.resume (never): a JobSet starts its pods again after a preemption, and "
            "every start would be from step 0; set checkpoint.resume=auto"
        )
    recipe = frozen_recipe(config, WORK)
    if redact(recipe) != recipe:
        problems.append(
            "the recipe has a password or a signature in a URL, and a ConfigMap is not secret: "
            "take it from the variables of a Secret (kubernetes.secrets in the site file)"
        )
    remote = config.checkpoint.remote
    run_dir = WORK / config.run_dir
    is_shared = any(run_dir.is_relative_to(path) for path in job.kubernetes.claims.values())
    if not is_shared and (remote is None or not is_remote(remote)):
        problems.append(
            f"run.dir ({run_dir}) is lost with its pod: mount a PersistentVolumeClaim there "
            f"(kubernetes.claims: {{NAME: {WORK}}} in the site file), or set checkpoint.remote to "
            "a store"
        )
    raise_all(problems)


def manifests(config: Recipe, job: Site) -> str:
    """The recipe as a ConfigMap, and the JobSet, as two YAML documents."""
    name = resource_name(config.run.name)
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-recipe"},
        "data": {"recipe.yaml": frozen_recipe(config, WORK)},
    }
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(job.kubernetes.max_restarts),
            "replicatedJobs": [
                {"name": NODES, "replicas": 1, "template": {"spec": job_spec(name, job)}}
            ],
        },
    }
    return dump_yaml(recipe) + "---\n" + dump_yaml(jobset)


def resource_name(name: str) -> str:
    """A name that Kubernetes takes, also with what JobSet appends for a pod. The names of different
    runs differ in a hash if they were shortened or have other letters: `kubectl apply` would give
    the recipe of one to the other."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not cleaned or not cleaned[0].isalpha():
        cleaned = f"run-{cleaned}".strip("-")
    if len(cleaned) > LONGEST_NAME or not name.isascii():
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        cleaned = f"{cleaned[: LONGEST_NAME - 7].strip('-')}-{digest}"
    return cleaned


def failure_policy(max_restarts: int) -> dict[str, Any]:
    """Restart after a failure, `max_restarts` times. A preemption is not counted, and a mistake of
    the user is not repeated.

    The messages are those of Kubernetes' job controller for the rules of `pod_failure_policy`.
    """
    return {
        "maxRestarts": max_restarts,
        "rules": [
            {
                "name": "mistake",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"exit code {MISTAKE} matching"],
            },
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [
                    f"exit code {PREEMPTED} matching",
                    "condition DisruptionTarget matching",
                ],
            },
        ],
    }


def pod_failure_policy() -> dict[str, Any]:
    """End the job at once, with a message that the JobSet's rules recognize. Any other exit status
    counts against `backoffLimit` (0), which ends the job too."""
    codes = [
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [status]}}
        for status in (MISTAKE, PREEMPTED)
    ]  # fmt: skip
    # a drained or preempted node, whose pod was killed before it had saved
    lost = {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {"rules": [*codes, lost]}


def job_spec(name: str, job: Site) -> dict[str, Any]:
    """The job of all pods: the n-th one, by its completion index, is node n."""
    return {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(),
        "template": {"spec": pod_spec(name, job)},
    }


def pod_spec(name: str, job: Site) -> dict[str, Any]:
    own = job.kubernetes
    limits: dict[str, Any] = {}
    if job.gpus_per_node:
        limits["nvidia.com/gpu"] = job.gpus_per_node
    mounts = [
        {"name": "recipe", "mountPath": str(RECIPE), "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": own.shared_memory}},
    ]
    for number, (claim, path) in enumerate(own.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": CONTAINER,
        "image": job.container,
        "workingDir": str(WORK),
        "command": ["clip-train"],
        "args": [
            "train",
            str(RECIPE / "recipe.yaml"),
            f"--ranks={job.tasks}",
            f"--nodes={job.nodes}",
            "--node-rank=$(NODE_RANK)",
            # the first pod, by its name in the headless service
            f"--master={name}-{NODES}-0-0.{name}:{PORT}",
        ],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        "envFrom": [{"secretRef": {"name": secret}} for secret in own.secrets],
        "resources": {
            "requests": {"cpu": str(job.cpus_per_task * job.tasks)},
            "limits": limits,
        },
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # from TERM to KILL: the ranks save
        "terminationGracePeriodSeconds": job.warn_seconds,
        "securityContext": {"runAsNonRoot": True, "fsGroup": USER},
        "containers": [container],
        "volumes": volumes,
    }
    if own.service_account is not None:
        pod["serviceAccountName"] = own.service_account
    if own.node_selector:
        pod["nodeSelector"] = own.node_selector
    return pod
