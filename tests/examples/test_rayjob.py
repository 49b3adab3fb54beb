"""The RayJob for KubeRay and its image fit each other, the tested versions, and the configuration that they run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
import yaml

from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from tests.e2e.worlds import ROOT

EXAMPLES = ROOT / "docs" / "examples"
IN_IMAGE = "/opt/flowtrain/"
SPEC_FIELDS = {
    "entrypoint",
    "runtimeEnvYAML",
    "backoffLimit",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "rayClusterSpec",
}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Those of KubeRay's API that the example uses: a misspelled one would be dropped without a word."""


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    page = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert (page["apiVersion"], page["kind"]) == ("ray.io/v1", "RayJob")
    found: dict[str, Any] = page["spec"]
    return found


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups(spec)]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in pods(spec) for container in pod["containers"]]


def config_of(spec: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    """The configuration that the entrypoint runs, and its options."""
    program, command, file, *arguments = shlex.split(spec["entrypoint"])
    assert (program, command) == ("flowtrain", "train") and file.startswith(IN_IMAGE)
    options = [each for each in arguments if each.startswith("--")]
    overrides = [each for each in arguments if each not in options]
    return load_config(ROOT / file.removeprefix(IN_IMAGE), overrides), options


def test_it_has_only_fields_that_kuberay_knows(spec: dict[str, Any]) -> None:
    assert spec.keys() <= SPEC_FIELDS and spec["rayClusterSpec"].keys() == CLUSTER_FIELDS
    assert all(group.keys() <= GROUP_FIELDS for group in groups(spec))


def test_its_command_is_a_command(spec: dict[str, Any]) -> None:
    config, options = config_of(spec)
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    assert options == ["--resume"] and "--resume" in {name for parameter in train.params for name in parameter.opts}
    mounts = [{mount["mountPath"] for mount in container["volumeMounts"]} for container in containers(spec)]
    assert all(any(config.runs_dir.startswith(f"{path}/") for path in paths) for paths in mounts)


def test_versions_are_those_that_were_tested(spec: dict[str, Any]) -> None:
    (tested,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    assert spec["rayClusterSpec"]["rayVersion"] == tested
    assert set(re.findall(r"rayproject/ray:([\d.]+)-", dockerfile)) == {tested}
    assert len({container["image"] for container in containers(spec)}) == 1
    copied = re.findall(r"^COPY .*\. (\S+)$", dockerfile, re.MULTILINE)
    assert copied == [IN_IMAGE.rstrip("/")] and f"{IN_IMAGE}constraints.txt" in dockerfile


def test_it_asks_for_the_token_and_gives_a_stop_its_time(spec: dict[str, Any]) -> None:
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60, "seconds, as a string"


def test_the_workers_have_room_for_the_actors(spec: dict[str, Any]) -> None:
    config, _ = config_of(spec)
    encoders = sum(
        encoder.data_parallel_size * encoder.tensor_parallel_size * encoder.num_cpus
        for encoder in config.encoders.values()
    )
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (worker,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert worker["minReplicas"] == worker["replicas"] == worker["maxReplicas"], "a run's actors start together"
    (container,) = worker["template"]["spec"]["containers"]
    assert encoders + config.backbone.num_cpus <= worker["replicas"] * float(container["resources"]["limits"]["cpu"])


def test_pods_mount_what_they_have_and_show_their_metrics(spec: dict[str, Any]) -> None:
    for pod in pods(spec):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert {"name": "metrics", "containerPort": 8080} in container["ports"]
            assert container["resources"]["requests"] == container["resources"]["limits"]
