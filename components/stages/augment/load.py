"""Which editor, writer and features the parameters ask for. A new one is a file with its class, its settings in
`params.py` and a case here."""

from pathlib import Path

from m3diff.endpoint import Endpoint
from m3diff.models.device import Device
from m3diff.stages.augment.drawn import DrawnEditor
from m3diff.stages.augment.features import ClipFeatures, EncoderFeatures
from m3diff.stages.augment.grammar import GrammarWriter
from m3diff.stages.augment.instruct_pix2pix import Pix2PixEditor
from m3diff.stages.augment.language_model import LanguageModel
from m3diff.stages.augment.params import Clip, Drawn, Encoder, Grammar, InstructPix2Pix, Remote, Source
from m3diff.stages.augment.parts import Editor, Features, Writer


def load_editor(cfg: Drawn | InstructPix2Pix, source: Source, device: Device) -> Editor:
    """Raises ParamsError where its model is not there or another one, DataError where the source holds no scenes."""
    match cfg:
        case Drawn():
            return DrawnEditor(source.root)
        case InstructPix2Pix():
            return Pix2PixEditor(cfg, device)


def load_writer(cfg: Grammar | Remote, seed: int, store: Path) -> Writer:
    """The writer; `store` is the file of kept answers."""
    match cfg:
        case Grammar():
            return GrammarWriter()
        case Remote():
            endpoint = Endpoint(cfg.url, cfg.model, cfg.key_variable, cfg.timeout_s, store, cfg.max_tokens)
            return LanguageModel(endpoint.ask, seed, cfg.model)


def load_features(cfg: Encoder | Clip, device: Device) -> Features:
    """Raises ParamsError where its model is not there or another one."""
    match cfg:
        case Encoder():
            return EncoderFeatures(cfg, device)
        case Clip():
            return ClipFeatures(cfg, device)
