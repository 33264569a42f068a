"""Local models are named by what their folder holds."""

from m3diff.records.files import sha256_of_folder
from m3diff.settings.section import ParamsError
from m3diff.stages.augment.params import LocalModel


def identity(cfg: LocalModel) -> str:
    """The digest of the folder of weights.

    Raises:
        ParamsError: it is no folder, or not the one that the parameters name.
    """
    if not (cfg.model / "model_index.json").is_file() and not (cfg.model / "config.json").is_file():
        raise ParamsError(f"{cfg.model}: holds no config.json or model_index.json; fetch the model or correct the path")
    found = sha256_of_folder(cfg.model)
    if cfg.sha256 not in (None, found):
        raise ParamsError(f"{cfg.model}: has the sha256 {found}, the parameters say {cfg.sha256}; correct one of them")
    return found
