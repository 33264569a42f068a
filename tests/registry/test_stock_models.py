"""A registered version of the family `auto`: its own code answers as this project does, merged or with adapters."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pytest
from PIL import Image

from m3diff.models.device import Device
from m3diff.models.generation import Captioner, load_base_captioner, load_captioner
from m3diff.records.sample import Turn
from m3diff.registry.model_source import find
from m3diff.stages.register.pyfunc import PyfuncCaptioner
from m3diff.stages.register.stage import MODEL_SIGNATURE, copy_code
from tests.tiny_auto import QUESTION, auto_checkpoint
from tests.tiny_vlm import minichange_pairs
from tests.toy import REPOSITORY

MAX_NEW_TOKENS = 6
TURN = {"question": "Is it red?", "answer": "no"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return auto_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return rows about pairs of two sizes, one image, no image, and a dialogue."""
    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(minichange_pairs(3)):
        paths = [str(folder / f"{number}-{side}.png") for side in range(2)]
        for image, path in zip(pair.images, paths, strict=True):
            image.save(path)
        rows.append({"images": paths, "question": None, "history": None})
    pair_paths = rows[0]["images"]
    rows.append({"images": pair_paths[:1], "question": "Which colour?", "history": None})
    rows.append({"images": [], "question": "Is two even?", "history": None})
    rows.append({"images": pair_paths, "question": "Which colour?", "history": [TURN]})
    return rows


def expected_answers(captioner: Captioner, rows: list[dict[str, Any]]) -> list[str]:
    """Return the answer to each row, computed alone."""
    answers = []
    for row in rows:
        prepared = captioner.processor.prepare(Image.open(path) for path in row["images"])
        history = [Turn(**turn) for turn in row["history"] or []]
        (answer,), _ = captioner.answer([prepared], [(*history, Turn(row["question"] or QUESTION))])
        answers.append(answer)
    return answers


@pytest.mark.parametrize("part", ["", "adapters"])
def test_a_version_answers_about_any_sample(checkpoint: Path, tmp_path: Path, part: str) -> None:
    rows = rows_of(tmp_path)
    model = PyfuncCaptioner()
    config: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
    if part:
        config["base"] = str(checkpoint.parents[1] / "base")
    model.load_context(SimpleNamespace(artifacts={"checkpoint": str(checkpoint / part)}, model_config=config))
    expected = expected_answers(load_captioner(checkpoint, MAX_NEW_TOKENS), rows)
    assert model.predict(None, pd.DataFrame(rows)) == expected
    assert len({*expected}) > 3, "equal answers would not show their order"


@pytest.mark.slow(12)
def test_a_stored_version_answers_with_its_own_code(checkpoint: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    original_uri = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        client = mlflow.MlflowClient()
        client.create_experiment("m3diff", (tmp_path / "artifacts").as_uri())
        mlflow.set_experiment("m3diff")
        with mlflow.start_run():
            logged = mlflow.pyfunc.log_model(
                name="m3diff",
                python_model=str(REPOSITORY / "components" / "stages" / "register" / "pyfunc.py"),
                artifacts={"checkpoint": str(checkpoint)},
                model_config={"max_new_tokens": MAX_NEW_TOKENS},
                code_paths=[str(copy_code(tmp_path / "code"))],
                signature=MODEL_SIGNATURE,
                pip_requirements=["torch"],
            )
        version = mlflow.register_model(logged.model_uri, "m3diff")
    finally:
        mlflow.set_tracking_uri(original_uri)
    source = find(uri, "m3diff", str(version.version), checkpoint.parents[1] / "base", MAX_NEW_TOKENS)
    rows = [row | {"history": row["history"] or []} for row in rows_of(tmp_path)[:3]]
    expected = expected_answers(load_captioner(source.folder, MAX_NEW_TOKENS), rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    script = (
        "import json, sys, mlflow, pandas as pd\n"
        f"mlflow.set_tracking_uri({uri!r})\n"
        f"model = mlflow.pyfunc.load_model('models:/m3diff/{version.version}')\n"
        "import m3diff\n"
        "answers = model.predict(pd.DataFrame(json.load(open('rows.json'))))\n"
        "print(json.dumps({'answers': answers, 'code': m3diff.__file__}))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["answers"] == expected
    assert not Path(result["code"]).is_relative_to(REPOSITORY)


@pytest.fixture(scope="module")
def thinking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose base would think before it answers."""
    return auto_checkpoint("qwen3_5", tmp_path_factory.mktemp("thinking"))


def test_the_base_answers_the_prompts_of_its_checkpoint(thinking_checkpoint: Path) -> None:
    """Retention compares answers of the base, whose folder lacks the arguments of the template."""
    base = load_base_captioner(thinking_checkpoint, MAX_NEW_TOKENS, Device(gpu=False, precision="fp32"))
    trained = load_captioner(thinking_checkpoint, MAX_NEW_TOKENS)
    prepared = base.processor.prepare(minichange_pairs()[0].images)
    prompts = [captioner.encode_prompt((Turn("Why?"),), prepared.marks) for captioner in (base, trained)]
    assert prompts[0] == prompts[1]
    assert base.processor.tokenizer.decode(prompts[0]).endswith("<think>\n\n</think>\n\n")
    answers = [captioner.answer([prepared], [(Turn("Why?"),)])[0] for captioner in (base, trained)]
    assert answers[0] != answers[1]
