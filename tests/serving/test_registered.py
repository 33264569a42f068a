"""A version as register logs it, over HTTP: by `m3diff serve`, and by `mlflow models serve` (docs/serving.md)."""

import os
import sys
from pathlib import Path

import httpx
import mlflow
import pytest

from m3diff.models.generation import load_captioner
from m3diff.stages.register.stage import SIGNATURE, copy_code
from tests.servers import free_port, started
from tests.serving.toy import base64_of, environment, form, png, running
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY


def register(root: Path, checkpoint: Path) -> str:
    """A store with one version, champion; returns its address."""
    uri = f"sqlite:///{root}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    client.create_experiment("m3diff", (root / "artifacts").as_uri())
    mlflow.set_experiment("m3diff")
    with mlflow.start_run():
        logged = mlflow.pyfunc.log_model(
            name="m3diff",
            python_model=str(REPOSITORY / "components" / "stages" / "register" / "pyfunc.py"),
            artifacts={"checkpoint": str(checkpoint)},
            model_config={"max_new_tokens": 64},
            code_paths=[str(copy_code(root / "code"))],
            signature=SIGNATURE,
            pip_requirements=["torch"],
        )
    version = mlflow.register_model(logged.model_uri, "m3diff", tags={"predict.max_new_tokens": "64"})
    client.set_registered_model_alias("m3diff", "champion", version.version)
    return uri


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ping").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow(110)
def test_a_registered_version_says_the_same_by_both_servers_whatever_partner_an_image_has(tmp_path, monkeypatch):
    """A server that caches an image's features must pass this (docs/serving.md): A with B, then A with C."""
    monkeypatch.setattr("tests.servers.PATIENCE_S", 240)
    folder = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number) for number in range(6)]
    pairs = [(one, other) for one in images for other in images if one is not other]
    captioner = load_captioner(folder, 64)
    want = [captioner.caption([pair])[0] for pair in pairs]
    assert len(set(want)) > 1
    before_uri = mlflow.get_tracking_uri()
    try:
        uri = register(tmp_path, folder)
    finally:
        mlflow.set_tracking_uri(before_uri)
    with running(tmp_path, toy=False, answer_s=300) as server:
        with httpx.Client(base_url=server.address, timeout=300) as client:
            for (one, other), caption in zip(pairs, want, strict=True):
                answer = client.post("/caption", **form(png(one), png(other), overlay="true")).json()
                assert (answer["caption"], answer["model"]) == (caption, "m3diff/1")
                assert answer["overlay"].keys() == {"before", "after"}
            refused = client.post("/caption", **form(png(images[0]), png(images[1]), question="a <image>"))
        assert (refused.status_code, refused.json()["error"]) == (422, "special_token")
    port = free_port()
    line = [str(Path(sys.executable).with_name("mlflow")), "models", "serve", "-m", "models:/m3diff@champion"]
    line += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    given = environment(MLFLOW_TRACKING_URI=uri, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    address = f"http://127.0.0.1:{port}"
    with started(line, tmp_path / "mlflow.log", lambda: answers(address), cwd=tmp_path, env=given):
        rows = [{side: base64_of(png(image)) for side, image in zip(("before", "after"), pairs[0], strict=True)}]
        answer = httpx.post(f"{address}/invocations", json={"dataframe_records": rows}, timeout=60)
    assert answer.json() == {"predictions": want[:1]}, (tmp_path / "mlflow.log").read_text()
