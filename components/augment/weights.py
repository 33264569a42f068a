"""Local models are named by what their folder holds."""

from components.augment.params import LocalModel
from components.files import sha256_of_folder
from components.section import ParamsError


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
