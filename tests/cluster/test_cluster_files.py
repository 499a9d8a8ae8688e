"""The SLURM script and the KubeRay manifest: well-formed, with options that exist and fit."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sebulba.cluster.inferencers import ray_actors
from sebulba.errors import UsageError
from sebulba.runs.read_config import read_config
from sebulba.tools.check import doctor
from sebulba.tools.check.checks import Level

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"

# Names and types of KubeRay's RayJob, ray.io/v1, as far as the manifest uses them, and of pods.
RESOURCES = {"cpu": str, "memory": str}
CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": RESOURCES, "limits": RESOURCES},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "spec": {
        "containers": [CONTAINER],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    }
}
RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "submissionMode": ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"),
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "headGroupSpec": {"rayStartParams": {"num-cpus": str}, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": {"num-cpus": str},
                    "template": POD,
                }
            ],
        },
    },
}
REQUIRED = {"apiVersion", "kind", "metadata", "spec", "entrypoint", "rayClusterSpec", "template"}
REQUIRED |= {"headGroupSpec", "groupName", "containers", "name", "image", "rayStartParams"}


def breaches(value: Any, schema: Any, where: str = "") -> list[str]:
    """Return where ``value`` has names or types that ``schema`` has not, or lacks what it needs."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where} is no mapping"]
        missing = (schema.keys() & REQUIRED) - value.keys()
        found = [f"{where}.{name} is not known" for name in value.keys() - schema.keys()]
        found += [f"{where}.{name} is missing" for name in missing]
        return found + [
            one
            for name in value.keys() & schema.keys()
            for one in breaches(value[name], schema[name], f"{where}.{name}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{where} is no list"]
        return [one for item in value for one in breaches(item, schema[0], f"{where}[]")]
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{where}={value!r} is no {schema.__name__}"]
    allowed = schema if isinstance(schema, tuple) else (schema,)
    return [] if value in allowed else [f"{where}={value!r} is none of {allowed}"]


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((FOLDER / "kuberay.yaml").read_text())


def test_the_manifest_has_the_form_of_a_ray_job(manifest):
    assert breaches(manifest, RAY_JOB) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["spec"].update(entryPoint="x"), ".spec.entryPoint is not known"),
        (lambda m: m["spec"].pop("entrypoint"), ".spec.entrypoint is missing"),
        (lambda m: m["spec"].update(backoffLimit="5"), "is no int"),
        (lambda m: m.update(kind="Job"), "is none of"),
        (lambda m: m["spec"]["rayClusterSpec"].update(workerGroupSpecs={}), "is no list"),
    ],
)
def test_the_check_of_its_form_finds_mistakes(manifest, change, said):
    change(manifest)
    assert any(said in breach for breach in breaches(manifest, RAY_JOB))


def config_of(words: list[str]) -> Any:
    assert words[:2] == ["sebulba", "train"]
    # The module of the environment is the user's.
    words = ["CartPole-v1" if word in ("my_env:MyEnv", "$environment") else word for word in words]
    return read_config(words[2:], "sebulba train")[1]


def test_the_options_of_the_manifest_fit_its_cluster(manifest):
    spec = manifest["spec"]["rayClusterSpec"]
    (workers,) = spec["workerGroupSpecs"]
    config = config_of(shlex.split(manifest["spec"]["entrypoint"]))
    cpus = int(workers["rayStartParams"]["num-cpus"])
    assert config.cluster.inferencers_per_node == cpus
    assert config.num_inferencers_per_device == cpus * workers["replicas"]
    assert config.cluster.nodes == 1 + workers["replicas"]
    pod = workers["template"]["spec"]["containers"][0]["resources"]
    assert int(pod["requests"]["cpu"]) > cpus and pod["requests"] == pod["limits"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["volumeMounts"]}
    assert [v["name"] for v in spec["headGroupSpec"]["template"]["spec"]["volumes"]] == [*mounts]
    assert str(config.run_dir).startswith(mounts["runs"])
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.slow
def test_the_script_is_bash_and_its_options_exist():
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^(sebulba train .*) &$", text, re.MULTILINE)
    values = {
        "$((per_node * (SLURM_NNODES - 1)))": "42",
        "$SLURM_JOB_ID": "7",
        "$SLURM_NNODES": "4",
        "$per_node": "14",
        "$head:$port": "node1:20007",
    }
    for name, value in values.items():
        command = command.replace(name, value)
    config = config_of(shlex.split(command))
    assert config.resume and config.cluster.nodes == 4
    assert config.cluster.inferencers_per_node * (4 - 1) == config.num_inferencers_per_device


def findings_of_cluster(monkeypatch: pytest.MonkeyPatch, address: str | None, machines: Any) -> Any:
    monkeypatch.setattr(ray_actors, "known_cluster", lambda: address)
    monkeypatch.setattr(ray_actors, "machines_of", machines)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    return doctor.check_cluster()


def test_the_doctor_names_the_machines_of_a_cluster(monkeypatch):
    machines = [ray_actors.Machine("one", 0.0), ray_actors.Machine("two", 16.0)]
    found = findings_of_cluster(monkeypatch, "head:6379", lambda address: (machines, 2.0))
    assert found.level is Level.OK
    assert found.seen == "head:6379, 2 machines: one (0 CPUs), two (16 CPUs); 2 CPUs are free"
    full = findings_of_cluster(monkeypatch, "head:6379", lambda address: (machines, 0.0))
    assert full.level is not Level.OK and "add machines" in full.remedy


def test_the_doctor_says_that_a_cluster_is_gone_or_that_there_is_none(monkeypatch):
    def gone(address: str) -> Any:
        raise UsageError("no cluster of Ray answers")

    assert "ray stop" in findings_of_cluster(monkeypatch, "head:6379", gone).remedy
    assert findings_of_cluster(monkeypatch, None, gone).level is Level.OK


def test_the_address_of_a_cluster_is_what_the_variable_or_the_file_of_ray_says(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_actors, "CURRENT_CLUSTER", str(tmp_path / "file"))
    assert ray_actors.known_cluster() is None
    (tmp_path / "file").write_text("10.0.0.1:6379\n")
    assert ray_actors.known_cluster() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert ray_actors.known_cluster() == "head:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")  # which would start one
    assert ray_actors.known_cluster() is None
