"""The recipe from Python: the same run as from the command line, and stages that cannot be."""

from __future__ import annotations

import pytest
from datasets import Dataset, load_dataset

import hf_linattn
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.errors import DataError, OptionError, PatchError
from hf_linattn.mechanisms.performer import PerformerConfig
from hf_linattn.training import Align, Calibrate, Distill, Distillation, Finetuning, Lengthen
from hf_linattn.training.arguments import DISTILLATION, parse_arguments
from hf_linattn.training.arguments.flags import flags_of
from tests.models import make_model
from tests.recipes.test_distill import flags, run, weights
from tests.recipes.test_finetune import command, material
from tests.recipes.test_finetune import run as finetune
from tests.training.test_finetuning import REQUIRED

__all__ = ["material"]
SAME = {
    "control": "none", "plan_steps": 0, "speed_lengths": [8, 24], "per_device_train_batch_size": 4, "eval_steps": 0.5,
    "save_steps": 0.5, "disable_tqdm": True, "window_dropout": 0.5,
}  # fmt: skip


def test_the_api_does_what_the_command_line_does(material, tmp_path):
    given = {name: load_dataset("json", data_files=material[f"{name}_file"])["train"]
             for name in ("train", "validation", "test")}  # fmt: skip
    stages = [Calibrate(256), Align(384), Distill(512, block_size=32, lora_rank=2, ce_weight=0.5)]
    distillation = Distillation(
        material["model_name_or_path"], {"hybrid": {"window_size": 4}}, given["train"], stages, tmp_path / "api",
        given["validation"], given["test"], **SAME,
    )  # fmt: skip
    report = distillation.run()
    changes = {"control": "none", "max_train_tokens": 1152, "transfer_tokens": 384, "transfer_learning_rate": 1e-3}
    expected = run(flags(material, tmp_path / "cli", **changes))
    assert report.perplexity == expected.perplexity and report.training.teaching == expected.training.teaching
    api, cli = weights(tmp_path / "api"), weights(tmp_path / "cli")
    assert api.keys() == cli.keys() and all((api[name] == cli[name]).all() for name in api)
    assert distillation.run() == report, "done already"


@pytest.mark.parametrize("given", ["a file", "from Python"])
def test_a_plan_that_was_chosen_for_another_model_is_refused(given, material, tmp_path):
    rows = load_dataset("json", data_files=material["train_file"])["train"]
    scores, local = [[0.0, 1.0], [0.0]], {"mechanism": "local"}
    record = PlanRecord("LlamaForCausalLM", [2, 1], "head", [[0, 1]], local, scores, "slope", "")
    plan, message = ChosenPlan.of(record), "chosen for LlamaForCausalLM with 2 layers of 1 to 2 key/value heads"
    if given == "a file":
        file = str(plan.save(tmp_path / "plan.json"))
        with pytest.raises(PatchError, match=message):
            run(flags(material, tmp_path / "run", mechanism=None, mechanism_options=None, plan=file))
    else:
        with pytest.raises(PatchError, match=message):
            Distillation(material["model_name_or_path"], plan, rows, [Distill(8192)], tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_fine_tuning_from_python_is_the_recipe(material, tmp_path):
    given = {name: load_dataset("json", data_files=material[f"{name}_file"])["train"]
             for name in ("train", "validation", "test")}  # fmt: skip
    options = {name: value for name, value in SAME.items() if name != "window_dropout"}
    options |= {"max_train_tokens": 512, "learning_rates": [1e-3], "block_size": 32}
    plan = {"performer": {"num_features": 16}}
    options["dataset_name"] = "of/a-recipe"  # gives way, as to a file
    report = Finetuning(
        material["model_name_or_path"], plan, given["train"], tmp_path / "api", given["validation"], given["test"],
        **options,
    ).run()  # fmt: skip
    assert not report.evaluation.held_out, "all of these are the train split of a file"
    assert (report.data, report.dataset_name) == ("data sets given from Python", None)
    changes = {"control": "none", "max_train_tokens": 512, "learning_rates": "1e-3", "lr_search_tokens": None}
    assert report.perplexity == finetune(command(material, tmp_path / "cli", **changes)).perplexity


@pytest.mark.parametrize(
    "stages",
    [[], [Align(8)], [Distill(8), Align(8)], [Distill(8), Distill(8)], [Lengthen(8), Distill(8)], [Distill(8), "x"]],
)
def test_stages_in_an_impossible_order_are_refused(tmp_path, stages):
    with pytest.raises(OptionError, match="give Calibrate, Align, Distill, Lengthen in this order, each at most once"):
        Distillation("gpt2", "linear", None, stages, tmp_path)


def test_what_is_no_list_no_name_and_no_folder_is_refused_by_its_argument(tmp_path):
    stage, model = Distill(8192), make_model("gpt2")
    for given, message in (
        (("gpt2", "linear", None, stage, tmp_path), r"stages must be a list, such as \[Distill\(1_000_000\)\], got"),
        (("gpt2", "linear", None, None, tmp_path), "stages must be a list, .* got None"),
        ((model, "linear", None, [stage], tmp_path), "model must be the folder or the name .*, got <.*GPT2LMHeadMod"),
        (("gpt2", "linear", None, [stage], None), "output_dir must be a folder for the results, got <class 'NoneT"),
    ):
        with pytest.raises(OptionError, match=message):
            Distillation(*given)
    with pytest.raises(OptionError, match="model must be the folder or the name of the original"):
        Finetuning(model, "linear", None, tmp_path)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"performer": range(2), "local": {"layers": (2,)}}, {"performer": [0, 1], "local": {"layers": [2]}}),
        ([{"mechanism": "performer", "layers": range(2)}], [{"mechanism": "performer", "layers": [0, 1]}]),
        (PerformerConfig(num_features=16), [{"mechanism": "performer", "options": {"num_features": 16}}]),
    ],
)
def test_a_plan_is_any_that_a_model_is_patched_with(tmp_path, plan, expected):
    found = Finetuning("gpt2", plan, None, tmp_path).arguments.model.plan
    if not isinstance(plan, dict | list):
        assert found[0]["options"].items() >= expected[0]["options"].items()
        found[0]["options"] = expected[0]["options"]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rates", (1e-3, 3e-3), [1e-3, 3e-3]),
        ("speed_lengths", range(64, 67), [64, 65, 66]),
        ("lora_target_modules", {"q_proj", "k_proj"}, ["k_proj", "q_proj"]),
        ("plan", ({"mechanism": "linear", "layers": [0]},), [{"mechanism": "linear", "layers": [0]}]),
    ],
)
def test_several_values_come_in_whatever_holds_them(name, given, expected):
    flags = flags_of({name: given}, {name})
    required = [*REQUIRED[:2], *REQUIRED[4:]] if name == "plan" else REQUIRED
    arguments = parse_arguments([*required, "--lora_rank", "2", *flags], DISTILLATION)
    assert next(getattr(group, name) for group in arguments if hasattr(group, name)) == expected


def test_data_sets_that_are_not_in_memory_are_refused_by_their_argument(material, tmp_path):
    given = load_dataset("json", data_files=material["train_file"], streaming=True)
    stages = [Distill(8192)]
    with pytest.raises(DataError, match=r"train_dataset of type IterableDataset is no .*\(list\(train_dataset\.take"):
        Distillation("gpt2", "linear", given["train"], stages, tmp_path)
    with pytest.raises(DataError, match=r"eval_dataset of type IterableDatasetDict .* eval_dataset\['validation'\]"):
        Distillation("gpt2", "linear", Dataset.from_dict({"text": []}), stages, tmp_path, given)


def test_options_are_those_of_the_recipe_and_checked(tmp_path):
    with pytest.raises(OptionError, match="unknown option 'learning_rte'; did you mean"):
        Distillation("gpt2", "linear", None, [Distill(8192)], tmp_path, learning_rte=1)
    with pytest.raises(OptionError, match=r"learning_rate=0.0001: .* give learning_rate to Distill\("):
        Distillation("gpt2", "linear", None, [Distill(8192)], tmp_path, learning_rate=1e-4)
    for option, value, given in (
        ("max_train_tokens", 50_000, "tokens to Distill"), ("kl_weight", 3.0, "kl_weight to Distill"),
        ("block_size", 64, "block_size to Distill"), ("learning_rates", [0.1], "learning_rate to Distill"),
        ("calibration_tokens", 0, "tokens to Calibrate"), ("long_block_size", 64, "block_size to Lengthen"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=f"^{option}=.*: stages have their own; give {given}"):
            Distillation("gpt2", "linear", None, [Calibrate(64), Distill(8192)], tmp_path, **{option: value})
    for name, argument in {"train_file": "train", "validation_file": "eval", "test_file": "test"}.items():
        with pytest.raises(OptionError, match=f"{name}='rows.jsonl': .* load it and give {argument}_dataset="):
            Finetuning("gpt2", "linear", None, tmp_path, **{name: "rows.jsonl"})
    with pytest.raises(OptionError, match="tokens must be"):
        Distill(0)
    with pytest.raises(OptionError, match="max_train_tokens leaves 8 tokens"):
        Distillation("gpt2", "linear", None, [Distill(8)], tmp_path)
    arguments = Distillation("gpt2", "linear", None, [Distill(8192), Lengthen(8192, block_size=1024)], tmp_path,
                             per_device_train_batch_size=1).arguments  # fmt: skip
    assert arguments.recipe.learning_rates == [1e-3] and arguments.distillation.long_block_size == 1024
    with pytest.raises(AttributeError):
        hf_linattn.training.nothing  # noqa: B018
