"""Export the trained model or the mixture of samples to a folder that can be shared.

Formats of the model, which `m3diff export` writes:

- merged (the default) and only adapters (`--adapters`): copies of the checkpoint for this project, by
  `export_checkpoint` in `m3diff.models.checkpoint`
- Hugging Face (`--hub`): a folder that loads without this project, by `export_hub` in `hub.py`. The model families that
  it supports are in `families.py`.

Format of the mixture, which `m3diff export-llava` writes: LLaVA records, by `export_llava` in `llava.py`.

To add a format of the model, write its function in a module of this package, and add a flag and a call of the function
in `command_line/export.py`. To add a format of the mixture, write its function in a module of this package, and add a
module to `command_line/` and an entry to `COMMANDS` in `m3diff.__main__`, as for `export-llava`.

`hub.py` and `llava.py` reject a dataset if its licence does not allow redistribution.
"""
