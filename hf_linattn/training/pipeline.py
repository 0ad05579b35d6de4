"""The stages of a recipe, from the original to the report, each done once."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_linattn import calibrate, choose_layers, get_patch_config, layer_sensitivity, unpatch_model
from hf_linattn.errors import OptionError
from hf_linattn.evaluation import measure_memory, measure_speed
from hf_linattn.files import write_whole
from hf_linattn.report import (
    Accuracies,
    Evaluation,
    Perplexities,
    Report,
    Stage,
    Training,
    collect_provenance,
    four_model_table,
    save_card,
    save_report,
    stage_table,
)
from hf_linattn.training.arguments import AUTO, Arguments, parse_arguments, tokens_per_step
from hf_linattn.training.finetuning import fine_tune, recover
from hf_linattn.training.options_help import help_if_asked
from hf_linattn.training.recipe import Recipe
from hf_linattn.training.run_directory import RunDirectory
from hf_linattn.transformers_bridge import MECHANISM

logger = logging.getLogger(__name__)

SENSITIVITY_ROWS = 64  # training rows on which the layers are ranked


def layers_stage(recipe: Recipe, run: RunDirectory) -> None:
    """Choose the layers to convert, if that was left open: the others lose too much, by `layer_sensitivity`."""
    options, training = recipe.arguments.model, recipe.arguments.training
    if options.layers != AUTO:
        return

    def compute() -> dict[str, Any]:
        model = recipe.convert()
        fitted = _calibrate(recipe, model, run.file("layers", ".safetensors")) if recipe.calibration_rows else {}
        rows = min(SENSITIVITY_ROWS, len(recipe.data.train))
        sensitivity = layer_sensitivity(model, recipe.batches(rows), progress=not training.disable_tqdm)
        chosen = choose_layers(sensitivity, options.softmax_share)
        return {"sensitivity": sensitivity, "layers": chosen, "calibration": fitted}

    chosen = run.stage("layers", compute)["layers"]
    options.layers = ",".join(map(str, chosen))


def calibration_stage(recipe: Recipe, run: RunDirectory) -> Path | None:
    """Fit the mechanisms on training rows, if that was asked for, and return the file of their state."""
    if not recipe.calibration_rows:
        return None
    file, chosen = run.file("calibration", ".safetensors"), run.finished("layers")

    def compute() -> dict[str, Any]:
        model = recipe.convert()
        if chosen is None:
            fitted = _calibrate(recipe, model, file)
        else:  # all layers were fitted before they were chosen, each for itself
            fitted, known = chosen["calibration"], model.state_dict()
            state = load_file(run.file("layers", ".safetensors"))
            model.load_state_dict({name: x for name, x in state.items() if name in known}, strict=False)
            _save_mechanisms(model, file)
        return {"eval_loss": recipe.validation_loss(model), **fitted}

    run.stage("calibration", compute)
    return file


def _calibrate(recipe: Recipe, model: PreTrainedModel, file: Path) -> dict[str, Any]:
    """Fit the mechanisms, write their state to a file, and return what that took."""
    count, start = recipe.calibration_rows, time.perf_counter()
    errors = calibrate(model, recipe.batches(count), progress=not recipe.arguments.training.disable_tqdm)
    seconds = round(time.perf_counter() - start, 1)
    _save_mechanisms(model, file)
    return {"tokens": count * recipe.arguments.data.block_size, "seconds": seconds, "layer_errors": errors}


def transfer_stage(recipe: Recipe, run: RunDirectory, mechanisms: Path | None) -> Path | None:
    """Train the mechanisms by attention transfer, if that was asked for, and return the file of their state."""
    options, training = recipe.arguments.distillation, recipe.arguments.training
    if not options.transfer_tokens:
        return mechanisms
    file = run.file("transfer", ".safetensors")
    if run.finished("transfer") is None:
        logger.info("stage transfer: %d steps", recipe.steps(options.transfer_tokens))
        model = recipe.convert(mechanisms)
        transfer = recipe.transfer(model)
        result, state = fine_tune(
            transfer,
            recipe.data,
            recipe.transfer_training,
            run.checkpoints("transfer"),
            learning_rate=options.transfer_learning_rate,
            max_steps=recipe.steps(options.transfer_tokens),
        )
        if result["eval_loss"] is None:
            rate = options.transfer_learning_rate
            raise OptionError(f"transfer_learning_rate={rate:g}: attention transfer diverged; give a lower one")
        with training.main_process_first(local=False):  # the others go on when the file is there
            if training.should_save:
                if state is not None:
                    model = recipe.convert(mechanisms)
                    recipe.transfer(model).load_state_dict(state)
                _save_mechanisms(model, file)
                loss = recipe.validation_loss(model)
                run.finish("transfer", result | {"transfer_loss": result["eval_loss"], "eval_loss": loss})
    return file


def long_stage(recipe: Recipe, run: RunDirectory, start: Path, learning_rate: float) -> dict[str, Any] | None:
    """Go on with the recovered model on longer rows, as many tokens to a step, if that was asked for."""
    options, data = recipe.arguments.distillation, recipe.long_data
    if data is None:
        return None
    long_run = RunDirectory(run.path, recipe.long_training)
    return recover(
        long_run, "long_training", lambda: recipe.adapted(recipe.load(start)), data, [learning_rate], 0,
        recipe.steps(options.long_tokens), run.path, recipe.teacher(inside=False), recipe.callbacks,
    )  # fmt: skip


def _save_mechanisms(model: nn.Module, file: Path) -> None:
    """Write the state of all mechanisms, whole or not at all."""
    state = {name: x.contiguous() for name, x in model.state_dict().items() if f".{MECHANISM}." in name}
    write_whole(file, lambda path: save_file(state, path))


def run_recipe(recipe: Recipe, run: RunDirectory, command: str) -> Report:
    """Run the stages, each only if its result is not recorded yet, and return the report."""
    options, training = recipe.arguments.recipe, recipe.arguments.training
    search_steps, control_path = recipe.steps(options.lr_search_tokens or 0), run.path / "control"
    layers_stage(recipe, run)
    scores = {
        "original": run.stage("original", lambda: recipe.score(recipe.load())),
        "converted": run.stage("converted", lambda: recipe.score(recipe.convert())),
    }
    results: dict[str, dict[str, Any] | None] = {
        "converted": run.stage(
            "converted_validation", lambda: {"eval_loss": recipe.validation_loss(recipe.convert())}
        )
    }
    if options.control_dir is None:
        control = recover(
            run, "control_training", recipe.exact, recipe.data, options.control_learning_rates or (), search_steps,
            recipe.steps(options.max_train_tokens), control_path,
        )  # fmt: skip
        scores["control"] = run.stage("control", lambda: recipe.score(unpatch_model(recipe.load(control_path))))
    else:
        lent = recipe.lent_control.items()
        control, scores["control"] = (run.stage(name, partial(dict, result)) for name, result in lent)
    mechanisms = calibration_stage(recipe, run)
    mechanisms = transfer_stage(recipe, run, mechanisms)
    short = run.path if recipe.long_data is None else run.file("recovered_training", "_model")
    recovered = recover(
        run, "recovered_training", lambda: recipe.trainee(mechanisms), recipe.data, options.learning_rates or (),
        search_steps, recipe.recovery_steps, short, recipe.teacher(), recipe.callbacks,
    )  # fmt: skip
    longer = long_stage(recipe, run, short, recovered["learning_rate"])
    scores["recovered"] = run.stage("recovered", lambda: recipe.score(recipe.load(run.path)))
    ended = run.stage(
        "recovered_validation", lambda: {"eval_loss": recipe.validation_loss(recipe.load(run.path))}
    )
    if training.should_save:
        recipe.tokenizer.save_pretrained(run.path)
        if control_path.exists():
            recipe.tokenizer.save_pretrained(control_path)
    results |= {name: run.finished(name) for name in ("calibration", "transfer")}
    results |= {"recovered": recovered, "long": longer}
    results["recovered" if longer is None else "long"] = (longer or recovered) | ended

    def report() -> dict[str, Any]:
        layers = run.finished("layers")
        built = build_report(recipe, recipe.load(run.path), scores, control, layers, results, command)
        return {"files": [file.name for file in (*save_report(built, run.path), save_card(built, run.path))]}

    run.stage("report", report)
    return Report.load(run.path)


# -- the report -------------------------------------------------------------------------------------------------------


def build_report(
    recipe: Recipe,
    model: PreTrainedModel,
    scores: dict[str, dict[str, Any]],
    control: dict[str, Any],
    run_layers: dict[str, Any] | None,
    results: dict[str, dict[str, Any] | None],
    command: str,
) -> Report:
    """Measure speed and memory of the recovered model beside its original attention, and put everything together."""
    model_options, data_options, options, training, _ = recipe.arguments
    step = tokens_per_step(data_options, training)
    mechanisms = {config.mechanism for config in get_patch_config(model).layers.values()}
    given: Any = model_options.plan or model_options.mechanism_options or {}  # dicts by now
    layers = {"layers": model_options.layers} if model_options.layers else {}
    files = [getattr(data_options, f"{split}_file") for split in recipe.splits]
    sources = [data_options.dataset_name, data_options.dataset_config_name, *files]
    recovered = results["recovered"] or {}
    searched = max(len(options.learning_rates or ()), len(options.control_learning_rates or ())) > 1
    classified = "accuracy" in scores["recovered"]
    return Report(
        base_model=model_options.model_name_or_path or "",
        mechanism="+".join(sorted(mechanisms)),
        options=given | layers,
        data=", ".join(filter(None, sources)) or "documentation of Python's standard library",
        dataset_name=data_options.dataset_name,
        dataset_config_name=data_options.dataset_config_name,
        perplexity=Perplexities(**{name: score["perplexity"] for name, score in scores.items()}),
        accuracy=Accuracies(**{name: score["accuracy"] for name, score in scores.items()}) if classified else None,
        evaluation=Evaluation(
            data_options.block_size, scores["recovered"]["num_tokens"], recipe.task.stride(data_options)
        ),
        training=Training(
            tokens=recipe.steps(options.max_train_tokens) * step,
            recovered_learning_rate=recovered["learning_rate"],
            control_learning_rate=control["learning_rate"],
            learning_rate_grid=tried(recovered),
            control_learning_rate_grid=tried(control),
            search_tokens=recipe.steps(options.lr_search_tokens or 0) * step if searched else 0,
            teaching=teaching_options(recipe.arguments),
        ),
        stages=tuple(stages(results, step)),
        sensitivity=tuple((run_layers or {}).get("sensitivity", {}).values()),
        provenance=collect_provenance(training.seed, command, device=model.device, dtype=model.dtype),
        fidelity=recipe.fidelity(model) if options.fidelity_windows else None,
        speed=tuple(measure_speed(model, recipe.speed_lengths)),
        memory=tuple(measure_memory(model, recipe.speed_lengths)),
    )


def tried(training: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the learning rates that were tried for a training."""
    return tuple(trial["learning_rate"] for trial in training["search"]) or (training["learning_rate"],)


def teaching_options(arguments: Arguments) -> dict[str, Any]:
    """Return the options of calibration, transfer and distillation that are not at their defaults."""
    default, chosen = type(arguments.distillation)(), asdict(arguments.distillation)
    losses = {name: getattr(arguments.recipe, name) for name in ("calibration_tokens", "kl_weight", "hidden_weight")}
    changed = {name: value for name, value in chosen.items() if value != getattr(default, name)}
    return {name: value for name, value in losses.items() if value} | changed


def stages(results: dict[str, dict[str, Any] | None], step: int) -> list[Stage]:
    """Return what the converted model came to after every stage that was run, on the validation split."""
    return [
        Stage(name, result.get("tokens", result.get("steps", 0) * step), result.get("seconds", 0.0), loss)
        for name, result in results.items()
        if result is not None and (loss := result["eval_loss"]) is not None
    ]


def main(argv: Sequence[str], kinds: Sequence[type], program: str, console: Console | None = None) -> Report:
    """Run a recipe with command-line arguments; print the table of the four models and return the report.

    Args:
        kinds: the groups of options it takes. program: how it was started, for the command that the report names.
        console: takes the tables; None: standard output.

    Raises:
        SystemExit: with code 0, when the help that was asked for is printed.
    """
    help_if_asked(argv, program, kinds, console=console)
    arguments = parse_arguments(argv, kinds)
    training = arguments.training
    logging.basicConfig(level=logging.INFO if training.should_log else logging.WARNING, format="%(message)s")
    recipe = Recipe.prepare(arguments, program, argv)
    run = RunDirectory(training.output_dir or "", training)
    run.open(recipe.options, arguments.recipe.overwrite_output_dir, training.resume_from_checkpoint is not None)
    report = run_recipe(recipe, run, f"{program} {shlex.join(argv)}")
    if training.should_log:
        console = console or Console()
        console.print(four_model_table(report))
        console.print(stage_table(report))
        console.print(f"saved to {run.path}; reloaded from there, its logits are bit-equal", soft_wrap=True)
    return report

