"""The files of infra/ that no test can bring up, held against the rest of the project."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from components import PRIVACY
from components.params import load_params
from infra import services
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
    assert set(values) - set(PRIVACY) == {
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "PREFECT_SERVER_UI_V2_ENABLED",
    }


def test_compose_shows_its_servers_to_this_machine_alone_and_sends_nothing_out():
    composed = load("compose.yaml")["services"]
    ports = [port for service in composed.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert all(composed[name]["env_file"] == ["env.offline"] for name in ("prefect", "mlflow", "worker"))


def test_composes_commands_are_those_of_make_up_on_its_ports(monkeypatch):
    for name in ("M3DIFF_PREFECT_PORT", "M3DIFF_MLFLOW_PORT", "M3DIFF_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", "set")
    composed = load("compose.yaml")["services"]
    for service in services.services():
        here = {"127.0.0.1": "0.0.0.0", services.WORKER: "compose"}
        program = Path(service.command[0]).name.rstrip(".0123456789")  # python3.11
        wanted = [program, *(here.get(word, word) for word in service.command[1:])]
        words = composed[service.name]["command"].strip('"').rpartition("exec ")[2].rstrip('"').split()
        assert set(wanted) <= set(words), service.name
        if service.port:
            assert composed[service.name]["ports"] == [f"127.0.0.1:{service.port}:{service.port}"]


def test_composes_servers_stand_on_postgresql_and_ask_for_a_token():
    composed = {name: entry["environment"] for name, entry in load("compose.yaml")["services"].items()}
    given = composed["prefect"] | composed["mlflow"]
    assert set(services.TOKENS) <= given.keys()
    assert composed["prefect"]["PREFECT_API_DATABASE_CONNECTION_URL"].startswith("postgresql+asyncpg://")
    assert composed["mlflow"]["MLFLOW_BACKEND_STORE_URI"] == composed["prepare"]["M3DIFF_MLFLOW_STORE"]
    assert composed["mlflow"]["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == composed["prepare"]["M3DIFF_MLFLOW_ARTIFACTS"]
    assert composed["worker"].keys().isdisjoint(services.SERVERS_ONLY)
    assert composed["worker"]["PREFECT_API_AUTH_STRING"] == composed["prefect"]["PREFECT_SERVER_API_AUTH_STRING"]


SECRET = re.compile(r"PASSWORD|TOKEN|SECRET|FORM_KEY|AUTH_STRING|CONNECTION_URL|STORE")


def test_no_secret_and_no_image_without_a_digest_stands_in_the_files():
    """Each comes from the environment, and compose refuses to start where one is missing."""
    for name, entry in load("compose.yaml")["services"].items():
        for variable, value in entry["environment"].items():
            if SECRET.search(variable) and variable != "MLFLOW_AUTH_CONFIG_PATH":
                assert re.search(r"\$\{\w+:\?", value), f"{name}: {variable}"
        assert entry["image"] == "m3diff" or entry["image"].startswith("${"), name
    image = (INFRA / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)$", image, re.MULTILINE) == ["${BASE}"]
    assert "*@sha256:*) ;; *)" in image
    assert "/infra/.env" in (REPOSITORY / ".gitignore").read_text().splitlines()
    assert "infra/.env" in (REPOSITORY / ".dockerignore").read_text().splitlines()


def test_nothing_runs_as_root_in_a_container():
    image = (INFRA / "Dockerfile").read_text()
    assert image.index("USER m3diff") > image.index("RUN pip install")
    pod = load("kubernetes/train.yaml")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert load("compose.yaml")["services"]["worker"]["user"] == "${M3DIFF_USER:-1000:1000}"


def test_ray_on_kubernetes_asks_for_a_token():
    assert load("kubernetes/train.yaml")["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


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
    assert "--build-arg BASE=python:3.11-" in image
    assert "pip install --no-cache-dir --require-hashes --no-deps -r infra/lock.txt" in image
    assert "openjdk-17-jre" in image
    assert "python infra/check_system.py" in image
