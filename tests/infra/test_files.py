"""The files of infra/ that no test runs agree with the rest of the project."""

import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from m3diff import PRIVACY
from m3diff.settings.load import load_params
from tests.toy import REPOSITORY

INFRA = REPOSITORY / "infra"


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


def test_the_image_is_built_on_a_digest_and_runs_as_a_user_with_the_python_and_java_that_a_run_needs():
    image = (INFRA / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)$", image, re.MULTILINE) == ["${BASE}"]
    assert "*@sha256:*) ;; *)" in image
    assert image.index("USER m3diff") > image.index("RUN pip install")
    assert "--build-arg BASE=python:3.11-" in image
    assert "pip install --no-cache-dir --require-hashes --no-deps -r infra/lock.txt" in image
    assert "openjdk-17-jre" in image
    assert "python infra/check_system.py" in image


def cluster() -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume claim and the RayJob."""
    claim, job = yaml.safe_load_all((INFRA / "kubernetes.yaml").read_text())
    return claim, job


def faults_of_cluster(*documents: dict[str, Any]) -> list[str]:
    schema = yaml.safe_load((REPOSITORY / "tests" / "infra" / "kubernetes.schema.yaml").read_text())
    return [best_match([fault]).message for one in documents for fault in Draft202012Validator(schema).iter_errors(one)]


def misspell(claim: Any, job: Any) -> None:
    job["spec"]["shutdownAfterJobFinish"] = True


def number_for_text(claim: Any, job: Any) -> None:
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def wrong_level(claim: Any, job: Any) -> None:
    spec = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    spec["resources"] = spec["containers"][0].pop("resources")


@pytest.mark.parametrize(
    "fault", [lambda claim, job: claim["metadata"].pop("name"), misspell, number_for_text, wrong_level]
)
def test_the_schema_takes_the_example_and_refuses_what_the_cluster_would_refuse(fault: Callable[[Any, Any], None]):
    documents = cluster()
    assert faults_of_cluster(*documents) == []
    fault(*documents)
    assert len(faults_of_cluster(*documents)) == 1


def test_the_cluster_example_asks_for_a_token_no_root_and_what_the_papers_profile_needs():
    compute = load_params(REPOSITORY / "profiles" / "paper.yaml").compute
    claim, document = cluster()
    job = document["spec"]["rayClusterSpec"]
    (group,) = job["workerGroupSpecs"]
    assert job["rayVersion"] == constrained("ray")
    assert job["authOptions"] == {"mode": "token"}
    for spec in (job["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) * group["replicas"] == compute.workers
    assert int(resources["requests"]["cpu"]) * group["replicas"] >= compute.workers * compute.cpus_per_worker


def test_the_cluster_example_and_the_texts_call_it_not_run():
    assert "not run by us" in (INFRA / "kubernetes.yaml").read_text()
    assert "not run by us" in (INFRA / "README.md").read_text().lower()
