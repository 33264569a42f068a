"""Uses shared folders as others do, by transformers' Auto classes, where only what these need can be imported.

    python -P use_hub.py REQUESTS ANSWERS

A request is {"folder", "images", "text"}: its answer is {"tokens"} of each pair, without padding, or {"error"}, with
"code" and "fields" if the error has them. Other requests are {"folder", "load": a class of transformers}, {"folder",
"save": a new folder, "options"}, {"folder", "prompt": images}, answered by {"input_ids"} and the names of all "inputs",
{"folder", "chat": messages}, answered by the tokens, {"folder", "pipeline": messages}, answered by the text of
transformers' own pipeline, and {"folder", "run": a script}, answered by what the script prints beside the folder.
"""

import importlib.util
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

HIDDEN = {"m3diff", "flows", "tests", "accelerate", "datasets", "dvc", "mlflow", "pandas", "peft", "polars", "prefect"}
HIDDEN |= {"pyarrow", "pydantic", "ray", "scipy", "sklearn", "torchvision"}


class Bare(PathFinder):
    """Finds nothing of this project and of what it needs beyond torch, transformers, safetensors and pillow."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare]
MAX_NEW_TOKENS = 8


@cache
def load(folder):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    return processor, AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)


def captions(folder, images, text=None, tensors=False, **options):
    import numpy as np
    import torch
    from PIL import Image

    if tensors:
        images = [torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) for path in images]
    return generated(folder, load(folder)[0](images=images, text=text, **options))


def generated(folder, inputs):
    processor, model = load(folder)
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
    pad = processor.tokenizer.pad_token_id
    return {"tokens": [[token for token in row if token != pad] for row in tokens.tolist()]}


def answer(request):
    import transformers

    folder = request["folder"]
    try:
        if "run" in request:
            os.chdir(Path(folder).parent)
            with redirect_stdout(io.StringIO()) as output:
                runpy.run_path(request["run"])
            return {"said": output.getvalue().splitlines()}
        if "load" in request:
            getattr(transformers, request["load"]).from_pretrained(folder)
            return {"loaded": True}
        if "save" in request:
            processor, model = load(folder)
            model.save_pretrained(request["save"], **request.get("options", {}))
            processor.save_pretrained(request["save"])
            return {}
        if "chat" in request:
            options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
            return generated(folder, load(folder)[0].apply_chat_template(request["chat"], **options))
        if "pipeline" in request:
            pipe = transformers.pipeline("image-text-to-text", model=folder, trust_remote_code=True)
            return pipe(text=request["pipeline"], max_new_tokens=MAX_NEW_TOKENS, return_full_text=False)[0]
        if "prompt" in request:
            inputs = load(folder)[0](images=request["prompt"])
            return {"input_ids": inputs["input_ids"].tolist(), "inputs": sorted(inputs)}
        return captions(**request)
    except Exception as error:
        coded = {"code": error.code, "fields": error.fields} if hasattr(error, "fields") else {}
        return {"error": f"{type(error).__name__}: {error}", **coded}


if __name__ == "__main__":
    requests, answers = map(Path, sys.argv[1:])
    missing = [name for name in sorted(HIDDEN) if importlib.util.find_spec(name) is None]
    result = {"answers": [answer(request) for request in json.loads(requests.read_text())], "missing": missing}
    answers.write_text(json.dumps(result, default=str))  # fields of errors may be paths
