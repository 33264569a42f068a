"""Uses shared folders as others do, by transformers' Auto classes; `bare.py` runs it.

    use_hub.py REQUESTS ANSWERS

A request is {"folder", "images", "text"}: its answer is {"tokens"} of each pair, without padding, or {"error"}. Other
requests are {"folder", "load": a class of transformers}, {"folder", "save": a new folder} and {"folder", "prompt":
images}, answered by {"input_ids"} and the names of all "inputs".
"""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor

MAX_NEW_TOKENS = 8
transformers.logging.disable_progress_bar()


@cache
def load(folder):
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    return processor, AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)


def captions(folder, images, text=None, **options):
    processor, model = load(folder)
    inputs = processor(images=images, text=text, **options)
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
    pad = processor.tokenizer.pad_token_id
    return {"tokens": [[token for token in row if token != pad] for row in tokens.tolist()]}


def answer(request):
    folder = request["folder"]
    try:
        if "load" in request:
            getattr(transformers, request["load"]).from_pretrained(folder)
            return {"loaded": True}
        if "save" in request:
            for part in load(folder):
                part.save_pretrained(request["save"])
            return {}
        if "prompt" in request:
            inputs = load(folder)[0](images=request["prompt"])
            return {"input_ids": inputs["input_ids"].tolist(), "inputs": sorted(inputs)}
        return captions(**request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


requests, answers = map(Path, sys.argv[1:])
missing = [
    name for name in ("components", "peft", "ray", "mlflow", "pyarrow") if importlib.util.find_spec(name) is None
]
told = {"answers": [answer(request) for request in json.loads(requests.read_text())], "missing": missing}
answers.write_text(json.dumps(told))
