"""The example for a Kubernetes cluster. No test runs it."""

from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from m3diff.settings.load import load_params
from tests.infra.toy import INFRA, constrained
from tests.toy import REPOSITORY


def cluster() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the volume claim and the RayJob."""
    claim, job = yaml.safe_load_all((INFRA / "kubernetes.yaml").read_text())
    return claim, job


def faults_of_cluster(*documents: dict[str, Any]) -> list[str]:
    schema = yaml.safe_load((REPOSITORY / "tests" / "infra" / "kubernetes.schema.yaml").read_text())
    return [
        best_match([fault]).message
        for document in documents
        for fault in Draft202012Validator(schema).iter_errors(document)
    ]


def test_the_cluster_example_is_valid():
    assert faults_of_cluster(*cluster()) == []


def test_the_cluster_example_has_the_tested_ray_and_asks_for_a_token():
    _, document = cluster()
    job = document["spec"]["rayClusterSpec"]
    assert job["rayVersion"] == constrained()["ray"]
    assert job["authOptions"] == {"mode": "token"}


def test_the_cluster_example_runs_without_root_on_the_shared_volume():
    claim, document = cluster()
    job = document["spec"]["rayClusterSpec"]
    (group,) = job["workerGroupSpecs"]
    for spec in (job["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_cluster_example_has_what_the_papers_profile_needs():
    compute = load_params(REPOSITORY / "profiles" / "paper.yaml").compute
    _, document = cluster()
    (group,) = document["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) * group["replicas"] == compute.workers
    assert int(resources["requests"]["cpu"]) * group["replicas"] >= compute.workers * compute.cpus_per_worker
