"""The fine-tune recipe as a whole, on a tiny model and tiny files: what it writes, what it refuses, how it resumes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import hf_linattn
from hf_linattn.errors import CheckpointError, DataError, OptionError, UnknownNameError
from hf_linattn.report import Report, plots
from hf_linattn.training import pipeline, run_directory, trainers
from hf_linattn.training.arguments import FINETUNING, DistillationArguments, parse_arguments
from hf_linattn.training.preparation import prepare
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.training.stages import recovery
from hf_linattn.training.stages import report as report_stage
from recipes import finetune
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.training.test_finetuning import REQUIRED, make_training

ROOT = Path(finetune.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, str]:
    """A checkpoint and three text files."""
    folder = tmp_path_factory.mktemp("material")
    make_model("gpt2", std=0.05).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    flags = {"model_name_or_path": str(folder / "model")}
    for split, documents in {"train": 24, "validation": 6, "test": 3}.items():
        texts = [" ".join(f"w{5 + (document + 3 * i) % 8}" for i in range(40)) for document in range(documents)]
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        flags[f"{split}_file"] = str(file)
    return flags


def command(material, output_dir, **changes) -> list[str]:
    """Flags of a run that takes seconds."""
    options = {
        **material, "mechanism": "performer", "mechanism_options": '{"num_features": 16}', "block_size": 32,
        "max_train_tokens": 768, "lr_search_tokens": 256, "learning_rates": "1e-3 3e-3", "speed_lengths": "8 24 4096",
        "per_device_train_batch_size": 4, "eval_steps": 0.5, "save_steps": 0.5, "disable_tqdm": True, "plan_steps": 0,
        "output_dir": str(output_dir), **changes,
    }  # fmt: skip
    split = {"learning_rates", "speed_lengths"}
    return [
        part
        for name, value in options.items()
        if value is not None
        for part in [f"--{name}", *(value.split() if name in split else [str(value)])]
    ]


def run(flags: list[str]) -> Report:
    return pipeline.main(flags, FINETUNING, "accelerate launch recipes/finetune.py")


def recorded(output_dir, stage: str) -> dict:
    return json.loads((Path(output_dir) / "stages" / f"{stage}.json").read_text())


def test_a_plan_is_reported_as_it_was_given_and_the_tokens_that_were_read(material, tmp_path):
    plan = {"performer": {"layers": [0], "num_features": 16}, "linear": [1]}
    changes = {"mechanism": None, "mechanism_options": None, "plan": json.dumps(plan), "learning_rates": "1e-20"}
    changes |= {"lr_search_tokens": None, "early_stopping_patience": 1, "eval_steps": 1, "save_steps": 1}
    report = run(command(material, tmp_path / "out", **changes))
    assert (report.mechanism, report.options) == ("linear+performer", plan)
    assert report.stages[-1].tokens == report.training.tokens == report.training.control_tokens == 2 * 128
    assert "Recovered on 256 tokens of" in (tmp_path / "out" / "README.md").read_text()
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| training tokens of recovered | 256 |\n| training tokens of control | 256 |" in page


def test_a_run_from_end_to_end(material, tmp_path, capsys, monkeypatch, quick_reports):
    monkeypatch.setattr(plots, "save_figure", quick_reports)  # the pictures are drawn here
    out = tmp_path / "out"
    report = run(command(material, out, control="window"))
    assert Report.load(out) == report
    perplexity = report.perplexity
    assert perplexity.control < 0.9 * perplexity.original and perplexity.recovered < 0.9 * perplexity.converted
    assert report.training.tokens == 768 and report.training.search_tokens == 256
    for name in ("control", "recovered"):
        training = recorded(out, f"{name}_training")
        losses = {trial["learning_rate"]: trial["eval_loss"] for trial in training["search"]}
        assert set(losses) == {1e-3, 3e-3}
        assert losses[getattr(report.training, f"{name}_learning_rate")] == min(losses.values())
        assert training["steps"] == 6
    window, trained = report.windows  # of a model served in bfloat16, whatever it was trained in
    assert trained == dataclasses.replace(window, trained=True, perplexity=trained.perplexity) != window
    assert not window.trained and trained.perplexity < 0.9 * window.perplexity
    assert recorded(out, "window_training")["steps"] == recorded(out, "control_training")["steps"]
    kept = hf_linattn.get_patch_config(AutoModelForCausalLM.from_pretrained(out / "window")).layers[0]
    assert (kept.mechanism, kept.window_size) == ("streaming", window.window_size)
    original = AutoModelForCausalLM.from_pretrained(material["model_name_or_path"], dtype=torch.bfloat16)
    fitting = hf_linattn.evaluation.streaming_for(original, bytes=report.constant_bytes)
    assert fitting == {"streaming": {"window_size": window.window_size, "num_sink_tokens": window.num_sink_tokens}}
    assert window.state_bytes <= report.constant_bytes
    assert [row.length for row in report.speed] == [8, 24], "lengths beyond the position table are left out"
    assert (out / "report.md").is_file()
    pictures = [out / f"{name}.png" for name in ("perplexity", "time", "state")]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert not list(out.rglob("checkpoint-*")), "checkpoints of finished trainings are removed"
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("original", "control", "converted", "recovered", "is bit-equal"))

    changes = {"mechanism": "linear", "mechanism_options": None, "learning_rates": "1e-3", "control_dir": out}
    other = run(command(material, tmp_path / "other", **changes))
    assert other.windows[1:] == (trained,) and not (tmp_path / "other" / "window").exists()
    assert other.windows[0].state_bytes <= other.constant_bytes < trained.state_bytes

    model = AutoModelForCausalLM.from_pretrained(out)
    assert {m.config.mechanism for m in hf_linattn.get_mechanisms(model).values()} == {"performer"}
    assert model.config.use_cache
    texts = [json.loads(line)["text"] for line in Path(material["test_file"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert hf_linattn.evaluation.perplexity(model, tokenizer, texts, max_length=32)["perplexity"] == pytest.approx(
        perplexity.recovered
    )


def test_training_starts_from_the_calibrated_mechanisms(material, tmp_path, monkeypatch):
    started = []
    real = recovery.fine_tune

    def watch(model, *arguments, **options):
        started.append({path: m.state_dict() for path, m in hf_linattn.get_mechanisms(model).items()})
        started[-1] = {path: {k: v.clone() for k, v in state.items()} for path, state in started[-1].items()}
        return real(model, *arguments, **options)

    monkeypatch.setattr(recovery, "fine_tune", watch)
    options = {"mechanism": "hedgehog", "mechanism_options": None, "calibration_tokens": 512, "hidden_weight": 0.5}
    report = run(command(material, tmp_path / "out", **options))
    assert report.training.teaching == {"calibration_tokens": 512, "hidden_weight": 0.5}
    *_, first, second, full = started  # two runs of the search and the full one; before them the control's
    fresh = hf_linattn.patch_model(AutoModelForCausalLM.from_pretrained(material["model_name_or_path"]), "hedgehog")
    for path, mechanism in hf_linattn.get_mechanisms(fresh).items():
        for key, tensor in mechanism.state_dict().items():
            assert torch.equal(first[path][key], full[path][key]) and torch.equal(second[path][key], full[path][key])
            assert not torch.equal(full[path][key], tensor)


def test_an_interrupted_run_goes_on_and_ends_the_same(material, tmp_path, monkeypatch):
    short = {"learning_rates": "1e-3", "lr_search_tokens": None}
    whole = run(command(material, tmp_path / "whole", **short))
    broken = tmp_path / "broken"

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    real = trainers.RecoveryTrainer._save_checkpoint
    saves = []

    def save_once(trainer, *arguments):
        real(trainer, *arguments)
        saves.append(trainer.state.global_step)
        raise KeyboardInterrupt

    for target, name, stand_in in [
        (trainers.RecoveryTrainer, "_save_checkpoint", save_once),  # in the middle of the control's training
        (recovery, "verify_saved", interrupt),  # after it, before its result is recorded
        (report_stage, "measure_speed", interrupt),  # at the very end
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, stand_in)
            with pytest.raises(KeyboardInterrupt):
                run(command(material, broken, **short))
        assert not (broken / "report.json").exists()
    assert saves == [3]
    report = run(command(material, broken, resume_from_checkpoint=broken, **short))
    assert report.perplexity == whole.perplexity
    for stage in ("control_training", "recovered_training"):
        assert recorded(broken, stage)["eval_loss"] == recorded(tmp_path / "whole", stage)["eval_loss"]
    weights, expected = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (broken, tmp_path / "whole"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_is_not_continued_on_other_content_of_the_same_files(material, tmp_path, monkeypatch):
    own = {name: Path(shutil.copy(path, tmp_path)) for name, path in material.items() if name.endswith("file")}
    own["model_name_or_path"] = Path(shutil.copytree(material["model_name_or_path"], tmp_path / "model"))
    flags = command(own, tmp_path / "out")
    monkeypatch.setattr(pipeline, "run_recipe", Mock(side_effect=KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(flags)
    for part in ("train", "validation", "test"):
        before = own[f"{part}_file"].read_text()
        own[f"{part}_file"].write_text(before.replace("w7", "w6", 1))
        with pytest.raises(OptionError, match=f"others .*{part}"):
            run(flags)
        own[f"{part}_file"].write_text(before)
    make_model("gpt2", std=0.05, seed=1).save_pretrained(own["model_name_or_path"])
    with pytest.raises(OptionError, match=r"others .*model"):
        run(flags)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train_file": "absent.txt"}, DataError, "train_file='absent.txt' does not exist"),
        ({"calibration_tokens": 512}, OptionError, "calibration_tokens=512: 'performer' has no parameters of its own"),
        ({"validation_file": "empty.txt"}, DataError, "validation_file=.* is empty"),
        ({"block_size": 65, "lr_search_tokens": 512}, OptionError, "block_size=65 is beyond the 64 positions"),
        (
            {"mechanism": "synthesizer", "mechanism_options": '{"max_length": 20}'},
            OptionError,
            "block_size=32 is beyond the 20 positions",
        ),
        ({"mechanism": "perfomer"}, UnknownNameError, "did you mean performer"),
        ({"mechanism_options": '{"features": 3}'}, OptionError, "no option 'features'"),
        ({"chunk_feed_forward": 0}, OptionError, "chunk_feed_forward must be None or an integer >= 1, got 0"),
        ({"max_positions": 64}, OptionError, "max_positions must be above 64, the positions that GPT2LMHeadModel has"),
        ({"layers": "0-2"}, OptionError, "layer 2, but the model has layers 0 to 1"),
        ({"control": "lora"}, OptionError, "control must be 'full' where lora_rank and control_dir are absent"),
        ({"control": "none", "control_dir": "other"}, OptionError, "control_dir must be absent where control is"),
        ({"control": "softmax"}, OptionError, "control must be one of none, .* window, or absent, got"),
        (
            {"control": "window", "mechanism": "dynamic_sparse", "mechanism_options": None},
            OptionError,
            "control='window': dynamic_sparse has no decoding state of constant size",
        ),
        ({"text_column": "words"}, DataError, "text_column='words'"),
        ({"resume_from_checkpoint": "out"}, CheckpointError, "no run of this recipe"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(material, tmp_path, monkeypatch, changes, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(error, match=message):
        run(command(material, tmp_path / "out", **changes))
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty.txt"]


def test_control_and_recovered_train_with_chunks(material, tmp_path, monkeypatch):
    """Every step and every score, of control and conversion; a run goes on with chunks of another size."""
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def watch(module, hidden_states):
        seen[module.training].add(hidden_states.shape[:-1].numel())
        return forward(module, hidden_states)

    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", watch)
    run(command(material, tmp_path / "out", learning_rates="1e-3", chunk_feed_forward=48))
    assert seen[True] == {32, 48}  # of 4 x 32 tokens, in whole tiles of 16
    for stage in ("recovered_training", "report"):
        (tmp_path / "out" / "stages" / f"{stage}.json").unlink()
    seen[True].clear()
    run(command(material, tmp_path / "out", learning_rates="1e-3", chunk_feed_forward=32))
    assert seen[True] == {32}


def test_rows_beyond_the_position_table_train_with_max_positions(material, tmp_path):
    """The original that stands beside it, the control and the recovered model all have the longer table."""
    long = {"block_size": 96, "max_positions": 96, "max_train_tokens": 384, "lr_search_tokens": None}
    report = run(command(material, tmp_path / "out", learning_rates="1e-3", **long))
    assert report.perplexity.original > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.n_positions == len(model.transformer.wpe.weight) == 96
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 96


def test_an_output_folder_in_use_is_refused_and_left_alone(material, tmp_path):
    half_written = tmp_path / "checkpoint-7" / "model.safetensors"
    half_written.parent.mkdir()
    half_written.write_bytes(b"half")
    with pytest.raises(OptionError, match="holds checkpoint-7 but no run that could be continued"):
        run(command(material, tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [half_written]


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_place_that_is_no_folder_is_refused_before_anything_is_read(tmp_path, place):
    (tmp_path / "file").touch()
    folder = tmp_path / place
    arguments = parse_arguments([*REQUIRED, "--use_cpu", "True", "--output_dir", str(folder)])
    message = "output_dir must be the path of a folder that can be made and written to, got '.*file"
    for check in (lambda: prepare(arguments), lambda: RunDirectory(folder, arguments.training).open({})):
        with pytest.raises(OptionError, match=message):  # and not that the model is not there
            check()


def test_a_folder_that_cannot_be_made_is_refused_by_the_option(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "write_json", full)
    with pytest.raises(OptionError, match=r"output_dir='.*' cannot be written to: .*No space left .*; give another"):
        RunDirectory(tmp_path / "out", make_training(tmp_path / "out")).open({})


def test_a_converted_checkpoint_is_not_converted_again(material, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(material["model_name_or_path"])
    hf_linattn.patch_model(model, "linear").save_pretrained(tmp_path / "converted")
    with pytest.raises(OptionError, match="is converted already"):
        run(command(material, tmp_path / "out", model_name_or_path=tmp_path / "converted"))


def options_table(kinds: Sequence[type]) -> str:
    """Return the options as a Markdown table; those inherited from transformers' TrainingArguments are left out."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for kind in kinds:
        own = kind.__annotations__
        for option in (f for f in dataclasses.fields(kind) if f.name in own):
            factory = option.default_factory
            default = option.default if factory is dataclasses.MISSING else factory()
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            lines.append(
                f"| `--{option.name}` | {'' if shown is None else f'`{shown}`'} | {option.metadata['help']} |"
            )
    return "\n".join(lines)


def test_the_table_of_options_in_the_readme_is_up_to_date():
    page = (ROOT / "recipes" / "README.md").read_text()
    assert options_table(FINETUNING) in page and options_table([DistillationArguments]) in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [["accelerate.commands.launch", "--cpu"], ["torch.distributed.run", "--nproc_per_node", "2"]]
)
def test_the_recipe_as_a_process_and_as_two(material, tmp_path, launcher):
    flags = command(material, tmp_path / "out", max_train_tokens=1024)
    result = subprocess.run(
        [sys.executable, "-m", *launcher, str(ROOT / "recipes" / "finetune.py"), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},  # torchrun does not name a CPU
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("bit-equal") == 1, "only the main process prints"
    steps = recorded(tmp_path / "out", "recovered_training")["steps"]
    assert steps == (4 if "--nproc_per_node" in launcher else 8), "the token budget is that of all processes together"
