"""Checkpoints in processes of their own: with the library, with `trust_remote_code`, and without the library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel, ViTImageProcessorPil, WhisperFeatureExtractor, pipeline

from hf_linattn import get_mechanisms, patch_model
from hf_linattn.support.tiny import tiny_config
from tests.helpers import make_tokenizer
from tests.models import fill, make_model

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Kind:
    """How a checkpoint is loaded and used: an Auto class, a task of `pipeline`, and what the pipeline is given."""

    auto_class: str
    task: str
    given: str
    processor: str = "tokenizer"


TEXT = Kind("AutoModelForCausalLM", "text-generation", "w7 w31 w12 w54 w9")
CHECKPOINTS = {
    "bert": Kind("AutoModelForMaskedLM", "fill-mask", "w7 w31 [MASK] w54 w9"),
    "gpt2": TEXT,
    "llama": TEXT,
    "qwen3": TEXT,
    "gemma2": TEXT,
    "vit": Kind("AutoModelForImageClassification", "image-classification", "picture.png", "image_processor"),
    "whisper": Kind("AutoModelForAudioClassification", "audio-classification", "sound.f32", "feature_extractor"),
}


def make_vit() -> tuple[PreTrainedModel, Any]:
    config = tiny_config(transformers.ViTConfig, num_labels=3)
    processor = ViTImageProcessorPil(size={"height": config.image_size, "width": config.image_size})
    return fill(transformers.ViTForImageClassification(config)), processor


def make_whisper() -> tuple[PreTrainedModel, Any]:
    """The encoder of Whisper with a classifier on it, and what makes it 50 places of a second of sound."""
    config = tiny_config(transformers.WhisperConfig, num_labels=3, max_source_positions=50)
    processor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1)
    return fill(transformers.WhisperForAudioClassification(config)), processor


# Loads every checkpoint and says what its pipeline answers, or what went wrong, in a fork for each setting. What it is
# asked is all text, so that transformers and the library, where it is named, are all that is imported.
PROGRAM = """
import json, os, sys
import transformers

class Hidden:
    def find_spec(self, name, *arguments):
        if name == "hf_linattn":
            raise ModuleNotFoundError(f"No module named {name!r}")

torch = transformers.modeling_utils.torch
transformers.pipeline, transformers.AutoModel, transformers.AutoTokenizer  # are imported once
def answer_of(name, class_name, task, given, options):
    answer = {}
    try:
        model = getattr(transformers, class_name).from_pretrained(name, **options)
        inputs, expected = torch.load(f"{name}/logits.pt")
        with torch.no_grad():
            answer["equal"] = torch.equal(model(**inputs).logits, expected)
        if given.endswith(".f32"):
            given = torch.frombuffer(bytearray(open(given, "rb").read()), dtype=torch.float32).numpy()
        answer["pipeline"] = transformers.pipeline(task, name, **options)(given)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer

for number, (library, asked) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        continue
    assert "hf_linattn" not in sys.modules
    if library == "imported":
        import hf_linattn
    elif library == "not installed":
        sys.meta_path.insert(0, Hidden())
    answers = [
        {name: answer_of(name, *checkpoint, options) for name, checkpoint in checkpoints.items()}
        for options, checkpoints in asked
    ]
    with open(f"answers{number}.json", "w") as file:
        json.dump(answers, file)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every checkpoint, with what it computes in `logits.pt` and what its pipeline answers in `answer.json`."""
    folder, random = tmp_path_factory.mktemp("checkpoints"), np.random.default_rng(0)
    Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "picture.png")
    sound = np.sin(np.arange(16000) / 20).astype(np.float32)
    sound.tofile(folder / "sound.f32")
    for name, kind in CHECKPOINTS.items():
        special = {"vit": make_vit, "whisper": make_whisper}
        model, processor = special[name]() if name in special else (make_model(name), make_tokenizer())
        if model.can_generate():
            model.generation_config.update(max_new_tokens=8, do_sample=False)
        patch_model(model, "hedgehog").save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
        given = {"picture.png": Image.open(folder / "picture.png"), "sound.f32": sound}.get(kind.given, kind.given)
        sampling = {"sampling_rate": 16000} if kind.given == "sound.f32" else {}
        inputs = processor(given, return_tensors="pt", **sampling)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            torch.save((dict(inputs), model(**inputs).logits), folder / name / "logits.pt")
        answer = pipeline(kind.task, model, **{kind.processor: processor})(given)
        (folder / name / "answer.json").write_text(json.dumps(answer))
        assert all(mechanism.calls for mechanism in get_mechanisms(model).values()), name
    return folder


Answers = dict[str, dict[str, Any]]  # of every checkpoint


@pytest.fixture(scope="module")
def elsewhere(folder) -> list[list[Answers]]:
    """What processes answer that have imported the library, that could, and that have none.

    The last is asked with trust, without, and for the models' own classes.
    """
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
    }  # fmt: skip
    configs = {name: json.loads((folder / name / "config.json").read_text()) for name in CHECKPOINTS}
    classes = {name: config["architectures"][0].removeprefix("HfLinattn") for name, config in configs.items()}

    def asked(options: dict[str, Any], classes: dict[str, str]) -> Any:
        kinds = CHECKPOINTS.items()
        return options, {x: (classes.get(x, kind.auto_class), kind.task, kind.given) for x, kind in kinds}

    trust = asked({"trust_remote_code": True}, {})
    plain, own = asked({}, {}), asked({}, classes)
    settings = [("imported", [plain]), ("installed", [trust]), ("not installed", [trust, plain, own])]
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, input="")
    assert done.returncode == 0, done.stderr
    answers = [json.loads((folder / f"answers{number}.json").read_text()) for number in range(len(settings))]
    assert [[len(x) for x in several] for several in answers] == [[len(CHECKPOINTS)] * n for n in (1, 1, 3)]
    return answers


@pytest.mark.parametrize("number", [0, 1], ids=["with the library", "with trusted code"])
def test_every_checkpoint_computes_and_answers_bit_for_bit_elsewhere(folder, elsewhere, number):
    for name, answer in elsewhere[number][0].items():
        assert answer == {"equal": True, "pipeline": json.loads((folder / name / "answer.json").read_text())}, name


@pytest.fixture
def without_the_library(elsewhere) -> list[Answers]:
    return elsewhere[2]


def test_trusted_code_says_what_to_install(without_the_library):
    for name, answer in without_the_library[0].items():
        assert "pip install hf_linattn" in answer["error"], name


def test_without_the_library_nothing_runs(without_the_library):
    """transformers asks for the trust by which it says what to install."""
    for name, answer in without_the_library[1].items():
        assert list(answer) == ["error"] and "trust_remote_code=True" in answer["error"], name


def test_a_model_class_by_itself_does_not_run_softmax(without_the_library):
    """The class would find sizes of its own and load the weights."""
    for name, answer in without_the_library[2].items():
        assert list(answer) == ["error"] and "hf_linattn" in answer["error"], name
