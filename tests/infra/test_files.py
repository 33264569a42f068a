"""The files of infra/ that no test can bring up, held against the rest of the project."""

import re
import tomllib
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from components import PRIVACY
from components.params import load_params
from tests.toy import REPOSITORY

INFRA = REPOSITORY / "infra"


def load(name: str) -> Any:
    return yaml.safe_load((INFRA / name).read_text())


def constrained(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_frozen_set_has_every_dependency_at_a_version_within_its_bounds():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "constraints.txt").read_text().split()
    frozen = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    wanted = [
        Requirement(text) for text in [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    ]
    assert [
        str(need) for need in wanted if not need.specifier.contains(frozen.get(canonicalize_name(need.name), "0"))
    ] == []


def test_env_offline_switches_off_what_the_package_switches_off_and_the_network():
    lines = [line for line in (INFRA / "env.offline").read_text().splitlines() if line and not line.startswith("#")]
    values = dict(line.split("=", 1) for line in lines)
    assert PRIVACY.items() <= values.items()
    assert set(values) - set(PRIVACY) == {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}


def test_compose_shows_its_servers_to_this_machine_alone_and_sends_nothing_out():
    services = load("compose.yaml")["services"]
    assert set(services) == {"prefect", "mlflow", "worker"}
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert all(service["env_file"] == ["env.offline"] for service in services.values())


def test_kubernetes_gives_training_the_gpus_and_cores_that_the_papers_profile_asks_for():
    compute = load_params(REPOSITORY / "profiles" / "paper.yaml").compute
    job = load("kubernetes/train.yaml")["spec"]["rayClusterSpec"]
    (group,) = job["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) * group["replicas"] == compute.workers
    assert int(resources["requests"]["cpu"]) * group["replicas"] >= compute.workers * compute.cpus_per_worker
    assert job["rayVersion"] == constrained("ray")


def test_kustomize_names_files_that_are_there():
    named = load("kustomization.yaml")
    files = [*named["resources"], *named["configMapGenerator"][0]["envs"]]
    assert [file for file in files if not (INFRA / file).is_file()] == []


def test_the_image_has_the_python_and_the_java_that_check_system_asks_for():
    image = (INFRA / "Dockerfile").read_text()
    assert "FROM python:3.11-" in image
    assert "openjdk-17-jre" in image
    assert "python infra/check_system.py" in image
