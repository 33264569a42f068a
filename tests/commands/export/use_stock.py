"""Uses folders of the family `auto` as others do, by transformers and peft, where this project cannot be imported.

    python -I use_stock.py REQUESTS ANSWERS

A request is a JSON object with {"model": a folder}, or {"base", "lora", "tuned": folders and a file} for adapters, and
{"decoding": arguments of `generate`}. Its inputs are {"images": pairs of paths, "question"} for the processor of the
folder "processor" or, if this processor cannot be loaded, {"inputs": a file of tensors}. The answer has the class of
the model, and the inputs, the logits after the prompt and the generated tokens of each pair.

The request {"script": a file, "beside": a folder} runs a script in the folder that contains the exported folder. Its
answer is what the script prints. ANSWERS is a file of torch with all answers.
"""

import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

HIDDEN = {"m3diff", "flows", "tests"}


class WithoutProject(PathFinder):
    """Finds nothing of this project."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [BuiltinImporter, FrozenImporter, WithoutProject]


def load_model(request: dict[str, Any]) -> Any:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    if "lora" not in request:
        return AutoModelForImageTextToText.from_pretrained(request["model"])
    model = AutoModelForImageTextToText.from_pretrained(request["base"])
    tuned_weights = load_file(request["tuned"])
    unknown_names = model.load_state_dict(tuned_weights, strict=False).unexpected_keys
    assert not unknown_names, unknown_names
    return PeftModel.from_pretrained(model, request["lora"])


def make_inputs(request: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoProcessor

    if "inputs" in request:
        return torch.load(request["inputs"])
    processor = AutoProcessor.from_pretrained(request["processor"], backend="pil")
    inputs = []
    for images in request["images"]:
        content: list[dict[str, str]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": request["question"]})
        message = {"role": "user", "content": content}
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs.append(dict(processor.apply_chat_template([message], **options)))
    return inputs


def run_script(request: dict[str, Any]) -> dict[str, Any]:
    os.chdir(request["beside"])
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(request["script"])
    return {"lines": output.getvalue().splitlines()}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    if "script" in request:
        return run_script(request)
    model = load_model(request).eval()
    all_inputs = make_inputs(request)
    all_tokens = []
    all_logits = []
    for inputs in all_inputs:
        with torch.inference_mode():
            all_logits.append(model(**inputs).logits[0, -1])
            tokens = model.generate(**inputs, **request["decoding"])
        all_tokens.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return {"class": type(model).__name__, "inputs": all_inputs, "logits": all_logits, "tokens": all_tokens}


if __name__ == "__main__":
    import torch

    request_file, answer_file = map(Path, sys.argv[1:])
    answers = [answer(request) for request in json.loads(request_file.read_text())]
    assert not HIDDEN & {name.partition(".")[0] for name in sys.modules}
    torch.save(answers, answer_file)
