"""Options of transformers' TrainingArguments and the stages of a recipe: honoured, or refused before anything."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.nn.functional import log_softmax
from transformers import TrainerCallback

from hf_linattn import patch_model
from hf_linattn.architecture import root_model
from hf_linattn.errors import OptionError
from hf_linattn.training import finetuning
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.api import Finetuning
from hf_linattn.training.arguments import DISTILLATION, DataArguments, parse_arguments
from hf_linattn.training.arguments.parsing import UNBOUNDED
from hf_linattn.training.arguments.refused import check_stages
from hf_linattn.training.finetuning import fine_tune, rehearse
from hf_linattn.training.losses.attention_transfer import AttentionTransfer
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.same_run import training_options
from hf_linattn.training.task import CLASSIFICATION, TextEncoder, task_of
from hf_linattn.training.trainers import RecoveryTrainer
from tests.helpers import make_tokenizer
from tests.models import SPINE, make_model
from tests.training.test_finetuning import REQUIRED, make_data, make_training
from tests.training.test_task import CLASSIFIER, classified, classifier


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_train_epochs 5", "num_train_epochs=5.0: the length of a run is given by .*; leave it out"),
        ("--num-train-epochs=3", "num_train_epochs=3.0: the length of a run is given by .*; leave it out"),
        ("--auto_find_batch_size True", "auto_find_batch_size=True: .* give per_device_train_batch_size"),
        ("--enable_jit_checkpoint True", "enable_jit_checkpoint=True"),
        ("--save_only_model True", "save_only_model=True"),
        ("--ignore_data_skip True", "ignore_data_skip=True"),
        ("--eval_on_start True", "eval_on_start=True"),
        ("--label_names classes", "label_names="),
        ("--greater_is_better True", "greater_is_better=True"),
        ("--push_to_hub True", "push_to_hub=True: .* run hf-linattn push"),
        ("--use_liger_kernel True", "use_liger_kernel=True"),
        ("--metric_for_best_model accuracy", "metric_for_best_model must be 'loss'.*got 'accuracy'"),
        ("--early_stopping_patience 0", "early_stopping_patience must be an integer >= 1, or absent, got 0"),
        (
            "--early_stopping_patience 2 --eval_strategy no --load_best_model_at_end False",
            "early_stopping_patience must be absent where eval_strategy is 'no', got 2",
        ),
        ("--resume_from_checkpoint elsewhere", "resume_from_checkpoint must be 'True', the output_dir.*'elsewhere'"),
        ("--report_to comet", "report_to='comet' is not known.* Known: .*wandb"),
        ("--bf16 True --fp16 True", "fp16 and bf16"),
        ("--fp16 True", "fp16=True: on a CPU it is left out, .* give bf16 true instead"),
        ("--bf16_full_eval True --fp16_full_eval True", "full eval"),
        ("--fp16_full_eval True", "fp16_full_eval=True: it rounds the weights that are trained"),
        ("--eval_strategy no", "load_best_model_at_end requires the save and eval strategy to match"),
        ("--save_steps 0.25", "save_steps must be eval_steps=0.125, .* or save_strategy 'best', got 0.25"),
        ("--lr_scheduler_type cosinus", r"lr_scheduler_type.*cosinus|cosinus.*lr_scheduler_type"),
        ("--lr_scheduler_kwargs {", "lr_scheduler_kwargs"),
        ("--transfer_output_weight 0 --transfer_weights_weight 0", "transfer_output_weight must be above 0"),
        ("--max_train_tokens 4096 --learning_rates 1e-3 1e-2", "max_train_tokens, of which the search takes 0.15,"),
        ("--lr_scheduler_kwargs abc", "lr_scheduler_kwargs must be JSON"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size must be at least 1, got 0"),
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps must be at least 1, got 0"),
        ("--save_total_limit 0", "save_total_limit must be at least 1, got 0"),
        ("--learning_rate nan", "learning_rate must be above 0 and finite"),
        ("--lora_dropout 0.1", "lora_dropout must be absent where lora_rank is, got 0.1"),
        ("--lora_mechanisms False", "lora_mechanisms must be absent where lora_rank is, got False"),
        ("--lora_rank 2 --lora_alpha 0", "lora_alpha must be above 0, or absent, got 0.0"),
        ("--layers auto --layer_unit head", "layer_unit must be absent where layer_search is, got 'head'"),
        ("--layers auto --layer_signal both", "layer_signal must be absent where layer_search is, got 'both'"),
        ("--label_smoothing_factor 1", "label_smoothing_factor must be at least 0 and below 1"),
    ],
)
def test_what_no_stage_can_honour_is_refused_with_the_options(flags, message):
    with pytest.raises(OptionError, match=message) as refused:
        parse_arguments([*REQUIRED, "--use_cpu", "True", *flags.split()], DISTILLATION)
    assert "\n" not in str(refused.value)


NUMBERS = [f.name for kind in DISTILLATION for f in fields(kind) if f.init and "float" in str(f.type)]
SETTING = ("--lora_rank", "2", "--long_block_size", "512", "--long_tokens", "100000", "--use_cpu", "true")


@pytest.mark.parametrize("name", sorted({*NUMBERS} - {*UNBOUNDED}))
def test_a_number_that_is_not_finite_is_refused_by_its_name(name):
    for number in ("inf", "nan"):
        with pytest.raises(OptionError, match=name):
            parse_arguments([*REQUIRED, *SETTING, f"--{name}", number], DISTILLATION)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_mixed_precision_that_accelerate_was_given_is_an_option_like_others(tmp_path, monkeypatch, has_instructions):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for launched, options in (("bf16", {}), ("no", {"bf16": True}), ("fp16", {"bf16": True})):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        training = make_training(tmp_path, **options)
        for made in (training, replace(training, max_steps=3)):
            assert training_options(made)["bf16"] is made.bf16 is has_instructions and not made.fp16
            assert made.mixed_precision == ("bf16" if has_instructions else "no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(OptionError, match=r"ACCELERATE_MIXED_PRECISION must be one of no, bf16, fp16, .* got 'fp8'"):
        make_training(tmp_path)


def test_float16_on_a_cpu_is_refused_however_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(OptionError, match="fp16=True: on a CPU it is left out"):
        Finetuning("gpt2", "linear", Dataset.from_list([{"text": "a"}]), tmp_path, max_train_tokens=1000, fp16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(OptionError, match="fp16=True: on a CPU it is left out"):
        parse_arguments(REQUIRED, DISTILLATION)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    on_gpu = make_training(tmp_path)
    on_gpu.use_cpu = False
    check_stages(on_gpu)


def transfer():
    return AttentionTransfer(patch_model(make_model("gpt2"), "hedgehog"))


def adapted():
    return add_adapters(patch_model(make_model("gpt2"), "hedgehog"), rank=2)


STAGES = {"control": lambda: patch_model(make_model("gpt2"), "softmax"), "transfer": transfer, "recovered": adapted}
FIT = [
    {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}, {"gradient_accumulation_steps": 2},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, {"optim": "sgd"},
    {"early_stopping_patience": 1}, {"include_num_input_tokens_seen": "all"}, {"save_strategy": "best"},
    {"eval_delay": 3},
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", FIT, ids=str)
def test_an_option_that_is_accepted_trains_in_every_stage(tmp_path, stage, options):
    training, data = make_training(tmp_path, **options), make_data(make_model("gpt2"))
    try:
        rehearse(stage, STAGES[stage], data, training, learning_rate=1e-3, max_steps=2, search_steps=2)
        result, _ = fine_tune(STAGES[stage](), data, training, tmp_path, learning_rate=1e-3, max_steps=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert result["steps"] == 2 and result["eval_loss"] is not None


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_kwargs": {"cycles": 3}}, "unexpected keyword argument 'cycles'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"optim": "galore_adamw"}, "[Gg]a[Ll]ore"),
        ({"dataloader_persistent_workers": True}, "persistent_workers"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval"),  # the runs of the search do not evaluate
    ],
    ids=str,
)
def test_an_option_that_a_stage_would_die_of_is_found_without_a_step(tmp_path, stage, options, message):
    training, data = make_training(tmp_path, **options), make_data(make_model("gpt2"))
    state = torch.get_rng_state()
    with pytest.raises(OptionError, match=f"the stage {stage} cannot be set up .*{message}"):
        rehearse(stage, STAGES[stage], data, training, learning_rate=1e-3, max_steps=2, search_steps=2)
    assert not list(tmp_path.iterdir()) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_whose_only_batch_is_dropped_is_refused(tmp_path, stage):
    """It took no step, and the report counted all of its tokens."""
    data = make_data(make_model("gpt2"))
    rows = len(data.train)
    for size, refused in ((rows, False), (rows + 1, True)):
        training = make_training(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=size)
        message = rf"dataloader_drop_last=True drops all {rows} rows of a training, .* has {size}; leave it out, or"
        with pytest.raises(OptionError, match=message) if refused else nullcontext():
            rehearse(stage, STAGES[stage], data, training, learning_rate=1e-3, max_steps=2)


def test_parameters_that_fsdp_cannot_shard_are_refused_by_name(tmp_path, monkeypatch):
    real = finetuning.RecoveryTrainer

    def sharding(*arguments):
        made = real(*arguments)
        made.is_fsdp_enabled = True
        return made

    def trained(name, dtype, **options):
        model = patch_model(make_model("gpt2").to(dtype), name, **options)
        rehearse("x", lambda: add_adapters(model, rank=2), make_data(model), training, learning_rate=1, max_steps=2)

    training = make_training(tmp_path)
    trained("hedgehog", torch.bfloat16)
    trained("linformer", torch.float32, sharing="layers")
    monkeypatch.setattr(finetuning, "RecoveryTrainer", sharding)
    with pytest.raises(OptionError, match=r"stage x has layers that read .* another one, .* give sharing 'kv'"):
        trained("linformer", torch.float32, sharing="layers")
    with pytest.raises(OptionError, match=r"stage x trains parameters in bfloat16 and float32, .* give bf16 true"):
        trained("hedgehog", torch.bfloat16)
    monkeypatch.setattr(real, "splits_layers", True)  # as under ZeRO-3, which takes several dtypes
    monkeypatch.setattr(finetuning, "RecoveryTrainer", real)
    with pytest.raises(OptionError, match=r"stage x has layers that read .* FSDP and ZeRO-3 keep those sharded"):
        trained("linformer", torch.float32, sharing="layers")
    trained("hedgehog", torch.bfloat16)
    monkeypatch.undo()
    monkeypatch.setattr(finetuning, "RecoveryTrainer", sharding)
    trained("hedgehog", torch.float32)
    trained("linear", torch.bfloat16)  # which has none of its own
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    training = make_training(tmp_path, bf16=True)
    trained("hedgehog", torch.bfloat16)


def test_adapters_that_find_no_module_are_refused_before_any_stage(tmp_path):
    wrong = lambda: add_adapters(STAGES["control"](), rank=2, target_modules=["absent"])  # noqa: E731
    with pytest.raises(OptionError, match="lora_target_modules has 'absent', which is the name of no module"):
        rehearse("recovered", wrong, None, make_training(tmp_path), learning_rate=1e-3, max_steps=2)


@pytest.mark.parametrize("stage", ["control", "recovered"])
def test_a_model_that_cannot_compute_activations_anew_is_refused_by_name(tmp_path, stage):
    model = STAGES[stage]()
    root_model(model).supports_gradient_checkpointing = False
    training, data = make_training(tmp_path, gradient_checkpointing=True), make_data(make_model("gpt2"))
    with pytest.raises(OptionError, match=r"_checkpointing=True: .*GPT2LMHeadModel cannot"):
        rehearse(stage, lambda: model, data, training, learning_rate=1e-3, max_steps=2)
    rehearse(stage, STAGES[stage], data, training, learning_rate=1e-3, max_steps=2)


class Losses(TrainerCallback):
    def __init__(self):
        self.train, self.validation = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.train += [logs["loss"]] if "loss" in logs else []
        self.validation += [logs["eval_loss"]] if "eval_loss" in logs else []


@pytest.mark.covering(2)
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("head", [None, CLASSIFIER])
@pytest.mark.parametrize("name", SPINE)
def test_smoothed_labels_change_the_training_loss_alone(tmp_path, name, head, taught):
    """Compared with the sum over all classes in float64, over the accumulated batches of the first step."""
    model = classifier(name, std=0.3) if head else make_model(name, std=0.3)
    if head:
        splits = DatasetDict({"train": classified(8), "validation": classified(8)})
        data = CLASSIFICATION.rows(splits, TextEncoder(make_tokenizer(), DataArguments(block_size=16)), model, 128)
    else:
        data = make_data(model)
    data = replace(data, collator=data.evaluation_collator, train=data.train.select(range(8)))
    patch_model(model, "linear")
    batches = [data.collator([data.train[i] for i in (2 * j, 2 * j + 1)]) for j in range(4)]
    wanted, task = [], task_of(model)
    for batch in batches:
        with torch.no_grad():
            logits = task.predicting(model(**{k: v for k, v in batch.items() if k != "labels"}).logits).double()
        labels = task.predicted(batch["labels"])
        log = log_softmax(logits[labels != -100], -1)
        right = labels[labels != -100]
        wanted += (-0.7 * log.gather(-1, right[:, None])[:, 0] - 0.3 * log.mean(-1)).tolist()
    training = make_training(
        tmp_path, label_smoothing_factor=0.3, max_steps=1, learning_rate=0.0, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, logging_steps=1, eval_steps=1, remove_unused_columns=False,
        train_sampling_strategy="sequential", save_strategy="no", seed=0,
    )  # fmt: skip
    losses = Losses()
    teacher = Teacher(patch_model(classifier(name) if head else make_model(name), "softmax")) if taught else None
    RecoveryTrainer(model, training, data, teacher, [losses]).train()
    assert losses.train == [pytest.approx(sum(wanted) / len(wanted), rel=1e-4)]
    plain = replace(training, label_smoothing_factor=0.0)
    assert losses.validation == [RecoveryTrainer(model, plain, data).evaluate()["eval_loss"]]
