"""A parameter file of the earlier shape rewritten into the present one, its comments kept: `m3diff migrate FILE`.

Values keep their meaning: what was one learning rate for everything but the vision encoder becomes a rate for each
part, a list of datasets becomes a mapping by name. What the earlier shape did not have comes from the embedded profile.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.datasets import DATASETS
from components.evaluate.protocols import protocols_of
from components.files import write_atomic
from components.profiles import (
    EXTENDS,
    NEW_KEYS,
    NEW_SECTIONS,
    RENAMED,
    RENAMED_SINCE,
    dump_commented,
    keep_copy,
    load_commented,
    read_yaml,
    renamed_keys,
)
from components.section import ParamsError

ORDER = (
    "paths",
    "models",
    "pretrain",
    "synthesize",
    "augment",
    "ingest",
    "validate",
    "convert",
    "train",
    "predict",
    "evaluate",
    "register",
    "promote",
    "serve",
    "compute",
)
MOVED_FILES = {
    "components/convert/templates.yaml": "profiles/questions.yaml",
    "components/model/base": "data/00_base",
    "data/06_captions": "data/06_predictions",
}
CHECKPOINTING = {"cheap": "selective"}
GPU_OF_MEMORY = {24: "RTX-4090-24GB", 40: "A100-40GB", 48: "L40S-48GB", 80: "H100-80GB", 141: "H200-141GB"}
"""The kind that an earlier file's memory of one GPU becomes; it is said, since others have as much."""
Say = Callable[[str], None]


def migrate(path: Path, embedded: Path, say: Say) -> None:
    """Rewrite a parameter file in place and keep a copy of it; each rename is said.

    Raises:
        ParamsError: there is no such file, it is no YAML mapping, or a section of it is missing.
    """
    raw, twice = read_yaml(path)
    if twice:
        raise ParamsError(f"{path}: {'; '.join(twice)}")
    if not renamed_keys(raw)[1]:
        return say(f"{path} has the present shape already; nothing is changed")
    if has_todays_sections(raw):
        text = renamed(path.read_text(encoding="utf-8"), embedded.read_text(encoding="utf-8"), say)
    elif missing := missing_keys(raw):
        raise ParamsError(f"{path}: has no {', '.join(missing)}; only a complete earlier file can be migrated")
    else:
        text = migrated(path.read_text(encoding="utf-8"), embedded.read_text(encoding="utf-8"), say)
    say(f"a copy of the file as it was: {keep_copy(path)}")
    write_atomic(path, text)
    return None


def has_todays_sections(raw: Mapping[str, Any]) -> bool:
    """Whether no key is in an earlier place: only names have changed since."""
    return renamed_keys(raw)[2] <= frozenset(RENAMED_SINCE.values()) | set(NEW_SECTIONS) | set(NEW_KEYS)


def renamed(text: str, embedded: str, say: Say) -> str:
    """The text of a file with today's sections, its keys under today's names."""
    values = load_commented(text)
    held = values.get("compute", ())
    if "gpu_memory_gb" in held:
        memory = held["gpu_memory_gb"]
        _rename(held, "gpu_memory_gb", "gpu_kind", gpu_kind(memory))
        say(f"compute.gpu_memory_gb: {memory} -> compute.gpu_kind: {_kind_said(memory)}")
    new = load_commented(embedded)
    _gate(values, new, say)
    for section, before in (("augment", "ingest"), ("serve", "compute")):
        if EXTENDS not in values and section not in values:
            values.insert(list(values).index(before), section, new[section])
            say(f"{section}: new, as in the embedded profile")
    return dump_commented(values)


def _gate(values: Any, new: Any, say: Say) -> None:
    """The gate's keys of `register` in the section `promote`, which a complete file gets whole."""
    held = values.get("register") or {}
    moved = {was: now for was, now in RENAMED_SINCE.items() if was in {f"register.{key}" for key in held}}
    if not moved:
        return
    complete = EXTENDS not in values
    section = new["promote"] if complete else type(values)()
    for was, now in moved.items():
        _put(section, now.partition(".")[2], *_take(held, was.partition(".")[2]))
        say(f"{was} -> {now}")
    if complete:
        _first_protocol(section, values["ingest"]["datasets"])
        guarded = ", ".join(section["guards"]) or "nothing"
        say(f"promote: new; the gain is measured on {section['protocol']}, guarded: {guarded}")
    values.pop("promote", None)
    values.insert(list(values).index("register") + 1, "promote", section)
    if not held:
        _take(values, "register")


def _first_protocol(section: Any, datasets: Mapping[str, Any]) -> None:
    """The gate on the first dataset's headline protocol; without a grammar there are no accuracies to guard."""
    name, entry = next(iter(datasets.items()))
    spec = DATASETS.get(entry.get("reader"))
    if spec is not None:
        section["protocol"] = f"{name}/{protocols_of(name, spec)[0].name}"
        section["guards"] = section["guards"] if spec.grammar else {}


def gpu_kind(memory_gb: Any) -> str | None:
    return GPU_OF_MEMORY.get(memory_gb)


def _kind_said(memory_gb: Any) -> str:
    kind = gpu_kind(memory_gb)
    if kind is None:
        return "null; name one of components/gpus.py for the plan's hours, or leave it where there is no GPU"
    return f"{kind}; name another of components/gpus.py if yours is another with this memory"


def missing_keys(raw: Mapping[str, Any]) -> list[str]:
    """Sections and renamed keys that a file of the earlier shape would have."""
    sections = [name for name in ORDER if name not in NEW_SECTIONS and not isinstance(raw.get(name), dict)]
    keys = [key.split(".") for key in RENAMED if key.count(".") == 1]
    return sections or [f"{section}.{key}" for section, key in keys if key not in raw[section]]


def migrated(text: str, embedded: str, say: Say) -> str:
    """The text of the file in the present shape."""
    old, new = load_commented(text), load_commented(embedded)
    minichange = old["paths"].get("minichange")
    _datasets(old, minichange, say)
    _sources(old)
    _generator(old, minichange, say)
    _model(old, new, say)
    _same_value(old, new, say)
    for section in (*NEW_SECTIONS, "paths", "validate", "train", "predict", "evaluate", "register"):
        _fill(old, new, section)
    _gate(old, new, say)
    return dump_commented(_in_order(old))


def _same_value(old: Any, new: Any, say: Say) -> None:
    """Keys whose value is the same under another name, or is no longer needed."""
    for was, now in RENAMED.items():
        section, _, key = was.partition(".")
        if key not in old[section]:
            continue
        if not now or "<name>" in now or now.startswith("synthesize."):
            _take(old[section], key)
            say(f"{was}: {'moved to ' + now if now else 'removed, no longer needed'}")
            continue
        target, _, name = now.partition(".")
        value = old[section][key]
        value = MOVED_FILES.get(value, value) if isinstance(value, str) else value
        if was == "train.gpu_memory_gb":
            value, remark = gpu_kind(value), f": {_kind_said(value)}"
        else:
            remark = ""
        if target == section:
            _rename(old[section], key, name, value)
        else:
            value = CHECKPOINTING.get(value, value) if isinstance(value, str) else value
            _put(new[target], name, value, _take(old[section], key)[1])
        say(f"{was} -> {now}{remark}")
    base = old["train"].get("base")
    old["train"]["base"] = MOVED_FILES.get(base, base)


def _datasets(old: Any, minichange: Any, say: Say) -> None:
    """The list of datasets as a mapping by name, each with the counts that validate expects of it."""
    listed = old["ingest"].get("datasets")
    if not isinstance(listed, list):
        return
    counts = old["validate"].get("expected_pairs") or {}
    named = type(old)()
    for entry in listed:
        name, _ = _take(entry, "name")
        if entry.get("reader") == "clevr_change" and entry.get("root") == minichange:
            entry["reader"] = "minichange"
            say(f"ingest.datasets.{name}.reader: clevr_change -> minichange, the benchmark that makes itself")
        if name in counts:
            entry["expected_pairs"] = _published(name, entry.get("reader"), counts[name])
        named[name] = entry
    old["ingest"]["datasets"] = named
    say("ingest.datasets: a list -> a mapping by name")


def _published(name: str, reader: Any, counts: Mapping[str, int]) -> Any:
    """The word `published` where the counts are those of the dataset's own file."""
    spec = DATASETS.get(reader)
    part = spec.part(name) if spec else None
    return "published" if part is not None and part.pairs() == dict(counts) else counts


def _sources(old: Any) -> None:
    """A source that names its dataset's own task need not; one that then says nothing is left out."""
    sources = old["convert"].get("sources") or {}
    for name in list(sources):
        spec = DATASETS.get(old["ingest"]["datasets"].get(name, {}).get("reader"))
        if spec is not None and sources[name].get("task", "difference") == spec.task:
            sources[name].pop("task", None)
        if not sources[name]:
            _take(sources, name)


def _generator(old: Any, minichange: Any, say: Say) -> None:
    """MiniChange is one of the datasets that make themselves, where it is ingested."""
    settings = old["synthesize"]
    if "seed" not in settings:
        return
    makes = "minichange" in old["ingest"]["datasets"]
    if "train_twice" in settings:
        _rename(settings, "train_twice", "oversample_types", settings["train_twice"])
    settings.insert(0, "root", minichange)
    settings.ca.comment = None
    if not makes:
        old.ca.items.pop("synthesize", None)
    old["synthesize"] = type(old)({"minichange": settings} if makes else {})
    remark = (
        "synthesize.minichange (train_twice -> oversample_types)" if makes else "removed: no MiniChange is ingested"
    )
    say(f"synthesize -> {remark}")


def _model(old: Any, new: Any, say: Say) -> None:
    """Module, adapters and learning rates of the model; `no_module` beside it has the same without the module."""
    train, models = old["train"], new["models"]
    if "lr" not in train:
        return
    vision, rate, module_rate = (_take(train, key)[0] for key in ("lr_tower", "lr", "lr_perception"))
    rates = {"vision": vision, "projector": rate, "module": rate if module_rate is None else module_rate, "llm": rate}
    for key, part in (("lora_rank", "rank"), ("lora_alpha", "alpha")):
        value, _ = _take(train, key)
        for model in models.values():
            if model["family"] == "m3diff":  # the others were not there yet
                model["lora"][part] = value
    models["m3diff"]["rates"].update(rates)
    models["m3diff"].pop("delays", None)  # all parts began together
    models["no_module"]["rates"].update(rates | {"module": None})
    module, _ = _take(train, "perception")
    for key in list(module or ()):
        now = RENAMED.get(f"train.perception.{key}", "").rpartition(".")[2]
        if now:
            _rename(module, key, now, module[key])
    if module is not None:
        models["m3diff"]["module"] = module
    train.insert(0, "model", "no_module" if module is None else "m3diff")
    most = {"unpacked": 1, "k": _take(train, "pack_k")[0]}.get(train["packing"])
    _rename(train, "packing", "max_captions_per_sequence", most)
    say("train.perception, lora_rank, lora_alpha, lr_tower, lr, lr_perception -> models.m3diff (module, lora, rates)")
    say("train.packing, pack_k -> train.max_captions_per_sequence (1, k, or null for all)")


def _fill(old: Any, new: Any, section: str) -> None:
    """What the earlier shape did not have, at its place, as the embedded profile has it."""
    if section in NEW_SECTIONS:
        old[section] = new[section]
        return
    for position, (key, value) in enumerate(new[section].items()):
        if key not in old[section]:
            old[section].insert(min(position, len(old[section])), key, value)


def _in_order(old: Any) -> Any:
    """The sections in their order, then any other, with the comment at the head."""
    ordered = type(old)()
    ordered.ca.comment = old.ca.comment
    for name in [*ORDER, *(name for name in old if name not in ORDER)]:
        _put(ordered, name, old[name], old.ca.items.get(name))
    return ordered


def _take(mapping: Any, key: str) -> tuple[Any, Any]:
    """Remove a key: its value, and the comment that stood with it."""
    comment = mapping.ca.items.pop(key, None)
    return mapping.pop(key, None), comment


def _put(mapping: Any, key: str, value: Any, comment: Any) -> None:
    mapping[key] = value
    if comment is not None:
        mapping.ca.items[key] = comment


def _rename(mapping: Any, key: str, name: str, value: Any) -> None:
    """Another name for a key, at the same place and with the same comment."""
    position = list(mapping).index(key)
    _, comment = _take(mapping, key)
    mapping.insert(position, name, value)
    if comment is not None:
        mapping.ca.items[name] = comment
