"""The plan of the profile blip2idc, and what a step of BLIP2IDC keeps, against a real one."""

from pathlib import Path

import pytest
import torch

from m3diff.commands.plan.memory import LOGITS, ONE_LAYER, count_activations
from m3diff.commands.plan.plan import Plan, meta_model
from m3diff.commands.plan.words import print_plan
from m3diff.models import FAMILIES
from m3diff.models.fused import fused_attention
from m3diff.models.tuning import prepare
from m3diff.settings.load import load_params
from tests.commands.plan.test_memory import NormInOneKernel, saved
from tests.commands.plan.test_profiles import TERA, plan_of
from tests.tiny_blip2 import QUERIES, TEXTS, blip2_settings, tiny_blip2, tiny_config
from tests.toy import REPOSITORY

FAMILY = FAMILIES["blip2idc"]
TOKENS, SUPERVISED = 40, 15


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_of("blip2idc", tmp_path_factory.mktemp("none"))


def test_the_plan_is_of_the_published_shapes_and_of_the_papers_adapters(plan: Plan) -> None:
    assert plan.base.startswith("published shapes of Salesforce/blip2-opt-2.7b, models/blip2-opt-2.7b is not here")
    assert sum(count for name, count in plan.parameters.items() if name.endswith("(frozen)")) == 3_744_761_856
    assert "projector" not in plan.parameters
    trained = {name: count for name, count in plan.parameters.items() if not name.endswith("(frozen)")}
    assert trained == {"vision": 1_757_184, "module": 577_536, "llm": 3_932_160}


def test_a_sequence_is_the_queries_a_start_token_and_a_reference_without_a_question(plan: Plan) -> None:
    assert plan.workload.prompt_tokens == 1
    assert plan.tokens == 32 + 1 + 15


def test_the_prompt_that_is_planned_is_the_processors(tmp_path: Path) -> None:
    base = tiny_blip2(tmp_path / "base", "opt")
    prompt = FAMILY.load_processor(base).encode_prompt("What has changed from the first image to the second?")
    assert FAMILY.prompt_tokens == len(prompt) - FAMILY.planned_config(base, blip2_settings()).image_tokens


def test_the_flops_of_the_vision_encoder_are_those_counted_by_hand(plan: Plan) -> None:
    terms = {term.name: term for term in plan.terms}
    linears = 39 * (4 * 1408**2 + 2 * 1408 * 6144) * 257 + 3 * 14 * 14 * 1408 * 256
    assert terms["vision encoder"].forward / TERA == pytest.approx(2 * linears / TERA)
    assert terms["LLM linears"].forward / TERA == pytest.approx(
        2 * 32 * (4 * 2560**2 + 2 * 2560 * 10_240) * plan.tokens / TERA
    )
    assert terms["LLM linears"].total == 2 * terms["LLM linears"].forward, "frozen"


def test_it_fits_its_gpu_with_a_margin_and_is_printed(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    from m3diff.settings.gpus import GPUS

    params = load_params(REPOSITORY / "profiles" / "blip2idc.yaml")
    assert plan.memory_total_gb == pytest.approx(14.5, abs=0.05), "the profile says so"
    assert 0.5 < plan.memory_total_gb / 24 < 0.75
    assert plan.gpus == 1
    assert plan.steps == 20 * 368 == 20 * params.compute.checkpoint_every_steps
    print_plan(params.train, params.compute, plan, GPUS[params.compute.gpu_kind or ""], 0.45)
    said = capsys.readouterr().out
    for part in ("vision (frozen)", "module", "Q-Former attention", "Salesforce/blip2-opt-2.7b", "RTX-4090-24GB"):
        assert part in said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("llm", "way"), [*((llm, "none") for llm in TEXTS), ("qwen2", "selective")])
def test_what_is_counted_on_shapes_is_what_autograd_is_handed_to_keep(
    llm: str, way: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = FAMILY.build(tiny_config(llm))
    prepare(model, FAMILY, blip2_settings())
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    FAMILY.fuse(model, way)
    ids = torch.full((1, TOKENS), 9)
    ids[:, :QUERIES] = model.config.image_token_index
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "logits_to_keep": (torch.arange(TOKENS) >= TOKENS - SUPERVISED)[None],
        "use_cache": False,
        **FAMILY.classes()[0].blank_images(model.config, "cpu"),
    }
    given = {tensor.untyped_storage()._cdata for tensor in inputs.values() if isinstance(tensor, torch.Tensor)}
    with saved(model, monkeypatch) as held, NormInOneKernel(), fused_attention():
        model(**inputs)
    kept = sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in given)
    counted = count_activations(
        meta_model(tiny_config(llm), FAMILY, blip2_settings(), precision), FAMILY, way, TOKENS, SUPERVISED
    )
    assert sum(size for name, size in counted.items() if name not in (LOGITS, ONE_LAYER)) == pytest.approx(
        kept, rel=0.05
    )


def test_full_recomputation_lowers_what_every_part_keeps() -> None:
    model = meta_model(tiny_config(), FAMILY, blip2_settings(), "bf16")
    held = {way: count_activations(model, FAMILY, way, TOKENS, SUPERVISED) for way in ("none", "full")}
    for part in ("vision", "module", "llm"):
        assert held["none"][part] > held["full"][part]
    assert ONE_LAYER in held["full"]
