"""A causal language model of transformers in a folder, decoded greedily. Its answers are kept as an endpoint's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.augment.params import Local
from components.augment.weights import identity
from components.endpoint import Answer, Answers, Question, key_of, without_thoughts
from components.progress import progress
from components.section import ParamsError

if TYPE_CHECKING:
    from components.models.device import Device


class LocalModel:
    def __init__(self, cfg: Local, store: Path, device: Device) -> None:
        self.cfg, self.device, self.identity = cfg, device, identity(cfg)
        self.answers = Answers(store)
        self.model: Any = None
        self.tokenizer: Any = None

    def ask(self, questions: Sequence[Question], told: str) -> list[Answer]:
        """The answer to each question, in order; `told` names the work on the progress bar."""
        facts = [self._facts(question) for question in questions]
        new = {key_of(known): (known, question) for known, question in zip(facts, questions, strict=True)}
        new = {key: value for key, value in new.items() if key not in self.answers.known}
        for key, (known, question) in progress(new.items(), told, len(new), "question"):
            self.answers.keep(key, known, self._answer(question))
        return [self.answers.known[key_of(known)] for known in facts]

    def _facts(self, question: Question) -> dict[str, Any]:
        asked = {"system": question.system, "question": question.text}
        return {"model": self.identity, **asked, "max_tokens": self.cfg.max_tokens}

    def _answer(self, question: Question) -> Answer:
        import torch

        if self.model is None:
            self._load()
        ids = self._prompt(question).to(self.device.torch)
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=self.cfg.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id or 0,
            )[0, ids.shape[1] :]
        text = without_thoughts(self.tokenizer.decode(made, skip_special_tokens=True)).strip()
        if len(made) == self.cfg.max_tokens and int(made[-1]) not in self._ends():
            return Answer("cut", text)
        return Answer("text", text) if text else Answer("empty", "")

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"local_files_only": True}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(self.cfg.model), **options)
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(self.cfg.model), dtype=self.device.dtype, use_safetensors=True, **options
            )
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ParamsError(
                f"{self.cfg.model}: is no causal language model of transformers with its tokenizer and its weights as "
                f"safetensors ({why}); save it anew with save_pretrained, or name another"
            ) from error
        self.model = model.to(self.device.torch).eval()

    def _prompt(self, question: Question) -> Any:
        """Token ids [1, tokens]: by the tokenizer's chat template, or as plain text where it has none."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer(f"{question.system}\n\n{question.text}\n\n", return_tensors="pt").input_ids
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": question.text}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}
