"""The stage that measures the recovered model beside the original and writes the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_linattn import get_patch_config, unpatch_model
from hf_linattn.cards import mechanism_names
from hf_linattn.evaluation import (
    Fidelity,
    LongLosses,
    embeddings,
    fidelity,
    long_losses,
    measure_memory,
    measure_speed,
    without_far_keys,
)
from hf_linattn.evaluation.label_metrics import METRICS as OF_LABELS
from hf_linattn.evaluation.label_metrics import REGRESSION
from hf_linattn.evaluation.samples import Sample
from hf_linattn.inference import set_aside
from hf_linattn.report import (
    Accuracies,
    Evaluation,
    LongContext,
    MetricRow,
    Perplexities,
    ReadingRow,
    Report,
    SquaredErrors,
    Stage,
    TextSample,
    Training,
    WindowRow,
    collect_provenance,
    save_card,
    save_report,
)
from hf_linattn.training.arguments import FULL, NONE, Arguments
from hf_linattn.training.run_folders import CONTROL, WINDOW
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.stages.recovery import RecoveredTraining
from hf_linattn.training.stages.training import TrainingPlan
from hf_linattn.training.task import TextEncoder
from hf_linattn.training.training_run import TrainingRun

# the stages that measured windows of equal bytes, and whether these were trained
WINDOWS = {"window": False, "window_trained": True}
METRICS = (*OF_LABELS, *embeddings.METRICS)
SCORED = ("original", "control", "converted", "recovered")
TAUGHT = ("calibration_tokens", "kl_weight", "hidden_weight", "cosine_weight", "similarity_weight")
READINGS = {"cut": "original_cut", "windows": "original_windows"}  # name in the report: stage
# by the name in the report: the stage after which the converted model has this validation loss
STAGES = {
    "converted": "converted_validation",
    "calibration": "calibration",
    "transfer": "transfer",
    "recovered": "recovered_training",
    "long": "long_training",
}


class ReportStage(OneProcessStage):
    """Write the report and the model card beside the recovered model, and the tokenizer beside both models."""

    name = "report"
    inputs: tuple[str, ...] = (
        *SCORED, *READINGS.values(), *WINDOWS, "layers", "control_training", *STAGES.values(), "recovered_validation",
    )  # fmt: skip

    def run(self, context: TrainingRun) -> dict[str, Any]:
        folder = context.directory.path
        if context.arguments.training.should_save:
            context.tokenizer.save_pretrained(folder)
            for beside in (folder / name for name in (CONTROL, WINDOW)):
                if beside.exists():
                    context.tokenizer.save_pretrained(beside)
        return super().run(context)

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        folder = context.directory.path
        built = build_report(context, context.load(folder))
        return {"files": [file.name for file in (*save_report(built, folder), save_card(built, folder))]}


def build_report(context: TrainingRun, model: PreTrainedModel) -> Report:
    """Measure speed and memory of the recovered model beside its original attention, and put everything together."""
    model_options, data_options, options, training, _ = context.arguments
    results = context.results
    scores: dict[str, Any] = {name: results.get(name, {}) for name in SCORED}
    control, recovered = results.get("control_training", {}), results["recovered_training"]
    plan = RecoveredTraining().plan(context)
    way = stages(results, plan)
    given: Any = model_options.plan or model_options.mechanism_options or {}  # a dict by now, or a list of them
    given = {"plan": given} if isinstance(given, list) else given
    layers = {"layers": model_options.layers} if model_options.layers else {}
    named = (None, None) if context.in_memory else (data_options.dataset_name, data_options.dataset_config_name)
    searched = max(len(options.learning_rates or ()), len(options.control_learning_rates or ())) > 1
    classified = "accuracy" in scores["recovered"]
    regressed = problem_of(context) == REGRESSION
    return Report(
        base_model=model_options.model_name_or_path or "",
        mechanism="+".join(mechanism_names({"": get_patch_config(model)})) or "softmax",
        options=given | layers,
        data=data_said(context),
        dataset_name=named[0],
        dataset_config_name=named[1],
        perplexity=None if regressed else Perplexities(**by_model(scores, "perplexity")),
        squared_error=SquaredErrors(**by_model(scores, "loss")) if regressed else None,
        accuracy=Accuracies(**by_model(scores, "accuracy")) if classified else None,
        metrics=metric_rows(scores),
        readings=reading_rows(context),
        evaluation=Evaluation(
            data_options.block_size,
            scores["recovered"]["num_tokens"],
            context.task.stride(data_options),
            problem_of(context),
            scores["recovered"].get("document_tokens"),
            context.held_out,
            data_options.completion_only,
            scores["recovered"].get("num_documents"),
        ),
        training=Training(
            tokens=sum(stage.tokens for stage in way),
            recovered_learning_rate=recovered["learning_rate"],
            control_learning_rate=control.get("learning_rate"),
            learning_rate_grid=tried(recovered),
            control_learning_rate_grid=tried(control) if control else (),
            search_tokens=plan.tokens(plan.search_steps) if searched else 0,
            teaching=teaching_options(context.arguments),
            saved_dtype=str(context.saved_dtype or model.dtype).removeprefix("torch."),
            control=control.get("trained", FULL) if control else NONE,
            control_tokens=tokens_of(control, plan) if control else None,
        ),
        stages=way,
        sensitivity=tuple(results.get("layers", {}).get("sensitivity", {}).values()),
        provenance=collect_provenance(training.seed, context.command, device=model.device, dtype=model.dtype),
        fidelity=compare_with_original(context, model) if options.fidelity_windows else None,
        long_context=read_long_documents(context, model) if options.long_windows else None,
        speed=tuple(measure_speed(model, context.speed_lengths)),
        memory=tuple(measure_memory(model, context.speed_lengths)),
        constant_bytes=results["window"].get("constant_bytes"),
        windows=tuple(window_row(context, stage, trained) for stage, trained in WINDOWS.items() if results.get(stage)),
        samples=read_samples(context, model),
    )


def data_said(context: TrainingRun) -> str:
    """Return in words what was trained and tested on."""
    if context.in_memory:
        return "data sets given from Python"
    options = context.arguments.data
    files = [getattr(options, f"{split}_file") for split in context.splits]
    sources = [options.dataset_name, options.dataset_config_name, *files]
    return ", ".join(filter(None, sources)) or "documentation of Python's standard library"


def metric_rows(scores: Mapping[str, Any]) -> tuple[MetricRow, ...]:
    """Return the metrics of the four models, by metric."""
    names = [name for name in METRICS if name in scores["recovered"]]
    return tuple(MetricRow(name, **by_model(scores, name)) for name in names)


def by_model(scores: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a number of each of the four models; None for one that there is not."""
    return {model: score.get(name) for model, score in scores.items()}


def problem_of(context: TrainingRun) -> str | None:
    """Return what a classifier or an embedding model is for; None for language models."""
    return getattr(context.task, "problem", None)


def score_of(context: TrainingRun, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the perplexity of a stage that scored a model; of a regression its squared error, which is its loss."""
    regressed = problem_of(context) == REGRESSION
    return {"perplexity": None, "squared_error": result["loss"]} if regressed else {"perplexity": result["perplexity"]}


def reading_rows(context: TrainingRun) -> tuple[ReadingRow, ...]:
    """Return what the original came to on documents longer than its table, cut and in windows."""
    found = {reading: context.results[stage] for reading, stage in READINGS.items() if stage in context.results}
    if context.windows is None:
        return ()
    strides = {"cut": None, "windows": context.windows.step}
    return tuple(
        ReadingRow(
            reading, context.windows.length, strides[reading],
            metrics={name: score[name] for name in METRICS if name in score}, **score_of(context, score),
        )
        for reading, score in found.items()
    )  # fmt: skip


def window_row(context: TrainingRun, stage: str, trained: bool) -> WindowRow:
    """Return what a window came to."""
    result = context.results[stage]
    (options,) = result["plan"].values()
    sizes = options["window_size"], options["num_sink_tokens"], result["bytes"]
    return WindowRow(*sizes, trained, **score_of(context, result))


def tried(training: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the learning rates that were tried for a training; the last may be half of one that diverged."""
    return tuple(dict.fromkeys([trial["learning_rate"] for trial in training["search"]] + [training["learning_rate"]]))


def teaching_options(arguments: Arguments) -> dict[str, Any]:
    """Return the options of calibration, transfer and distillation that are not at their defaults."""
    default, chosen = type(arguments.distillation)(), asdict(arguments.distillation)
    losses = {name: getattr(arguments.recipe, name) for name in TAUGHT}
    changed = {name: value for name, value in chosen.items() if value != getattr(default, name)}
    return {name: value for name, value in losses.items() if value} | changed


def tokens_of(result: Mapping[str, Any], plan: TrainingPlan) -> int:
    """Return how many tokens a stage read; older records of trainings say their steps alone."""
    return result["tokens"] if "tokens" in result else plan.tokens(result.get("steps", 0))


def stages(results: Mapping[str, dict[str, Any]], plan: TrainingPlan) -> tuple[Stage, ...]:
    """Return what the converted model came to after every stage that was run, on the validation split."""
    done = {name: results[stage] for name, stage in STAGES.items() if stage in results}
    last = list(done)[-1]
    done[last] = done[last] | results["recovered_validation"]  # of the model as it was saved
    return tuple(
        Stage(
            name, tokens_of(result, plan), result.get("seconds", 0.0), loss,
            result.get("tokens_per_second"), result.get("matrix_share"),
        )
        for name, result in done.items()
        if (loss := result["eval_loss"]) is not None
    )  # fmt: skip


def compare_with_original(context: TrainingRun, model: PreTrainedModel) -> Fidelity:
    """Compare a converted model with the original on the test split."""
    size, texts = context.arguments.data.block_size, context.splits["test"]["text"]
    prompt = size // 4
    found = fidelity(
        model, context.load(), context.tokenizer, texts, max_length=size,
        num_windows=context.arguments.recipe.fidelity_windows, prompt_length=prompt,
        new_tokens=min(64, size - prompt), control=load_control(context),
        add_special_tokens=not context.arguments.data.completion_only,
    )  # fmt: skip
    if found.linear_share is None:
        return found
    with without_far_keys(model):
        return replace(found, perplexity_without_linear=context.score(model)["perplexity"])


def read_long_documents(context: TrainingRun, model: PreTrainedModel) -> LongContext:
    """Read long documents of the test split with the recovered model, the original and the control."""
    texts, options = context.splits["test"]["text"], context.arguments

    def read(reader: PreTrainedModel) -> LongLosses:
        return long_losses(
            reader, context.tokenizer, texts, length=context.long_length, num_windows=options.recipe.long_windows,
            add_special_tokens=not options.data.completion_only,
        )  # fmt: skip

    recovered = read(model)
    with set_aside(model):
        original, control = read(context.load()), load_control(context)
        return LongContext(recovered, original, None if control is None else read(control))


def read_samples(context: TrainingRun, model: PreTrainedModel) -> tuple[TextSample, ...]:
    """Return a few test texts and what each of the models makes of them; one at a time is on the device."""
    count = context.arguments.recipe.text_samples
    if not count:
        return ()
    encoder = TextEncoder(context.tokenizer, context.arguments.data)
    test = context.arguments.data.tested(context.splits["test"])

    def read(reader: PreTrainedModel | None) -> list[Sample] | None:
        return None if reader is None else context.task.samples(reader, encoder, test, count)

    recovered = context.task.samples(model, encoder, test, count)
    if not recovered:
        return ()
    with set_aside(model):
        original = read(context.load()) or []
        control, converted = read(load_control(context)), read(context.convert()) or []
    controls = [None] * len(recovered) if control is None else [sample.answer for sample in control]
    return tuple(
        TextSample(own.prompt, own.truth, first.answer, second, third.answer, own.answer)
        for own, first, second, third in zip(recovered, original, controls, converted, strict=True)
    )


def load_control(context: TrainingRun) -> PreTrainedModel | None:
    """Load the control of this run, or the one it shares; None where it is not kept any more."""
    folder = Path(context.arguments.recipe.control_dir or context.directory.path) / CONTROL
    return unpatch_model(context.load(folder)) if folder.exists() else None
