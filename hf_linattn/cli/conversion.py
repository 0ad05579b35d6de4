"""What `hf-linattn convert` does, step by step: nothing is written before everything is known to be right."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..atomic_io import is_writable
from ..config import given_as, require, require_known
from ..errors import OptionError
from ..json_files import read_object
from ..plan import PatchConfig, name_or_plan, require_registered
from ..reading import TOKENIZER_FILE, find_tokenizer, is_there, read_tokenizer, reading, without_tokenizer
from .choosing import PlanRequest, choice, in_words, save_beside
from .common import (
    DTYPES,
    check_calibration_tokens,
    load,
    note,
    read_texts,
    require_original,
    to_default_device,
)
from .conversion_words import CONFIGS, without_place, words

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .. import ChosenPlan
    from ..cards import Calibrated, Conversion, Measured
    from ..sentence_models import SentenceModel

# the files that tell of a processor: the first is what transformers writes now, the others what it wrote before
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# what the file of a processor that is no more than one part says -> the Auto class that reads it
KINDS_OF_PROCESSORS = {
    "feature_extractor_type": "AutoFeatureExtractor", "image_processor_type": "AutoImageProcessor",
    "video_processor_type": "AutoVideoProcessor",
}  # fmt: skip
CAUSAL = "AutoModelForCausalLM"
AS_SAVED = "auto"  # value of `dtype`
LENGTH = 2048  # tokens after which the decoding state is measured
MEASURING = "evaluate"  # the package that measurements need, of the extra [eval]


@dataclass(frozen=True)
class Wanted:
    """The command line of `hf-linattn convert`; see its options."""

    model: str
    output: Path
    plan: PlanRequest
    calibrate: Sequence[Path]
    calibration_tokens: int
    cross_attention: str | None
    max_positions: int | None
    dtype: str
    max_shard_size: str
    length: int | None
    base_model: str | None
    dry_run: bool
    progress: bool

    def __post_init__(self) -> None:
        require_known("dtype", self.dtype, (AS_SAVED, *DTYPES))
        check_calibration_tokens(self.calibrate, self.calibration_tokens)

    def say(self, text: str) -> None:
        """Say what goes on, unless JSON alone is wanted."""
        if self.progress:
            note(text)


@dataclass(frozen=True)
class Done:
    """What was done, as JSON and as what is shown in its place."""

    document: dict[str, Any]
    words: list[Any] = field(default_factory=list)


def run(wanted: Wanted) -> Done:
    """Convert a model, or say what would come of it."""
    from .. import ChosenPlan, patch_model, unpatch_model
    from ..cards import SENTENCES, Conversion, check_hub_id, loader_of, read_base

    check_output(wanted.output)
    check_shard_size(wanted.max_shard_size)
    check_hub_id(wanted.base_model)
    named, texts = wanted.plan.read(), read_texts(wanted.calibrate, "calibrate")
    if named is None or isinstance(named, ChosenPlan):
        from .. import report  # noqa: F401 - draws the plan at the end; a package that it lacks is named now
    across = None if wanted.cross_attention is None else name_or_plan("cross_attention", wanted.cross_attention)
    if across is not None:
        require_registered(across)
    model, modules = original(wanted)
    base = read_base(wanted.model, wanted.base_model)  # after the model: its error says all where there is none
    if base.hub_id is None:
        wanted.say("the card names no original; give --base-model owner/name")
    if named is None or texts:  # what only patches is left where it is: it may be larger than a GPU
        to_default_device(model)
    beside = processors(wanted.model, wanted.max_positions, modules)
    plan = wanted.plan.replacement() if named is None else named
    if model.main_input_name == "input_ids" and not any(map(tokenizer_of, beside.values())):
        note(without_tokenizer("model", wanted.model))
    patch_model(model, plan, cross_attention=across)
    length, batches, fitted = state_length(model, wanted), rows_to_fit(model, wanted, texts, modules), None
    if named is None:  # the search comes when all else is known to be right with what replaces heads
        unpatch_model(model)
        plan = wanted.plan.choose(model, wanted.model, wanted.progress)
        patch_model(model, plan, cross_attention=across)
    if batches and not wanted.dry_run:
        fitted = fit(model, batches, wanted)
    chosen = plan if isinstance(plan, ChosenPlan) else None
    conversion = Conversion(
        base, SENTENCES if modules else loader_of(model.config), patches_of(model),
        measured=measured_state(model, length, wanted), calibrated=fitted,
        command=f"hf-linattn {shlex.join(without_place(word, wanted.model) for word in sys.argv[1:])}",
    )  # fmt: skip
    document = describe(model, wanted, conversion, list(beside)) | ({} if chosen is None else choice(chosen))
    if batches:
        document["calibration"] = calibration_document(batches, fitted)
    to_write = wanted, conversion, chosen, beside.values(), modules
    document |= {"files": files_beside(model, *to_write)} if wanted.dry_run else write(model, *to_write)
    head = [] if chosen is None else [in_words(chosen)]
    return Done(document, [*head, *words(document, conversion, wanted.model, wanted.calibrate, wanted.plan.text)])


def check_output(output: Path) -> None:
    """Raise `OptionError` unless a folder can be made or written to, without harm."""
    if os.path.exists(output) and (not output.is_dir() or any(output.iterdir())):
        raise OptionError(f"output={str(output)!r} is not an empty folder; give another path")
    require("output", str(output), is_writable(output), "the path of a folder that can be made and written to")


def check_shard_size(max_shard_size: str) -> None:
    """Raise `OptionError` unless this is the size of a file."""
    from huggingface_hub import split_torch_state_dict_into_shards

    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
        positive = float(max_shard_size.rstrip(ascii_letters)) > 0
    except (ValueError, OverflowError):
        positive = False
    require("max_shard_size", max_shard_size, positive, "a size like 5GB or 500MB")


def original(wanted: Wanted) -> tuple[PreTrainedModel, SentenceModel | None]:
    """Load a model that is not converted, with its positions extended if asked for.

    Of an embedding model of sentence-transformers the encoder is converted; what else it has is returned beside it.
    """
    from ..positions.extend import reach_max_positions
    from ..sentence_models import SentenceModel, is_sentence_model

    modules = None
    if is_sentence_model("model", wanted.model):
        modules = SentenceModel(wanted.model, wanted.dtype, "model")
    loaded = load(wanted.model, dtype=wanted.dtype) if modules is None else modules.take_encoder()
    require_original("model", wanted.model, loaded)
    extended = loaded if wanted.max_positions is None else reach_max_positions(loaded, wanted.max_positions)
    return extended, modules


def rows_to_fit(
    model: PreTrainedModel, wanted: Wanted, texts: Sequence[str], modules: SentenceModel | None
) -> list[dict[str, Any]]:
    """Return the batches that the new attention is fitted on; none if it is not asked for.

    Raises:
        OptionError: nothing in the model can be fitted.
    """
    if not texts:
        return []
    from .. import get_mechanisms
    from ..calibration import what_is_fitted
    from ..calibration_rows import calibration_batches

    if not what_is_fitted(get_mechanisms(model)):
        raise OptionError("calibrate: this attention has nothing of its own that could be fitted; leave calibrate out")
    tokenizer = read_tokenizer("model", wanted.model) if modules is None else modules.tokenizer
    return calibration_batches(model, tokenizer, texts, tokens=wanted.calibration_tokens)


def fit(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], wanted: Wanted) -> Calibrated:
    """Fit the new attention to the original's; the model is changed in place."""
    from .. import calibrate
    from ..calibration_rows import count_tokens
    from ..cards import Calibrated

    start = time.perf_counter()
    held_out = calibrate(model, batches, progress=wanted.progress).held_out
    names, taken = [file.name for file in wanted.calibrate], sum(layer.taken for layer in held_out.values())
    return Calibrated(count_tokens(batches), names, len(held_out), taken, time.perf_counter() - start)


def calibration_document(batches: Sequence[Mapping[str, Any]], fitted: Calibrated | None) -> dict[str, Any]:
    """Return what `calibrate` did, or would be given."""
    from ..calibration_rows import count_tokens

    done = {} if fitted is None else {"layers": fitted.layers, "taken": fitted.taken, "seconds": fitted.seconds}
    return {"tokens": count_tokens(batches), **done}


def state_length(model: PreTrainedModel, wanted: Wanted) -> int | None:
    """Return after how many tokens the decoding state is measured: of a causal language model, and where it is asked.

    None: it is not measured.

    Raises:
        OptionError: the model has no decoding state, or not as many positions.
    """
    from ..cards import loader_of

    if wanted.length == 0 or (wanted.length is None and loader_of(model.config) != CAUSAL):
        return None
    if model.config.is_encoder_decoder or not model.can_generate():
        what = "has an encoder" if model.config.is_encoder_decoder else "has no decoding state"
        raise OptionError(
            f"length={wanted.length} is for a decoder alone; {type(model).__name__} {what}, leave length out"
        )
    if wanted.length is None and importlib.util.find_spec(MEASURING) is None:
        wanted.say(f"the decoding state is not measured: that needs {MEASURING}; run pip install 'hf_linattn[all]'")
        return None
    from ..evaluation import position_limit
    from ..evaluation.speed import check_lengths

    length = min(LENGTH, position_limit(model) or LENGTH) if wanted.length is None else wanted.length
    with given_as(lengths="length"):
        check_lengths(model, [length])
    return length


def measured_state(model: PreTrainedModel, length: int | None, wanted: Wanted) -> Measured:
    """Measure the decoding state beside softmax's after that many tokens; None: not."""
    from ..cards import Measured

    if length is None:
        return Measured()
    from ..evaluation import state_bytes_by_length

    wanted.say(f"measuring the decoding state after {length:,} tokens")
    (row,) = state_bytes_by_length(model, [length])
    return Measured(state=(row.patched, row.original, length))


def bytes_of_weights(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that are saved, those that are tied once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def files_of_weights(model: PreTrainedModel, max_shard_size: str) -> int:
    """Return how many files the weights are saved in."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(model.state_dict(), max_shard_size=max_shard_size)
    return len(split.filename_to_tensors)


def patches_of(model: PreTrainedModel) -> dict[str, PatchConfig]:
    """Return the patch of the whole model."""
    from .. import get_patch_config

    return {"": get_patch_config(model)}


def describe(model: PreTrainedModel, wanted: Wanted, conversion: Conversion, beside: list[str]) -> dict[str, Any]:
    """Return what a conversion is, as JSON."""
    from ..cards import layers_in_words

    config, state = conversion.patches[""], conversion.measured.state
    document = {
        "output": str(wanted.output), "model_class": type(model).__name__, "layers": config.num_layers,
        "converted_layers": len(config.converted), "parameters": sum(x.numel() for x in model.parameters()),
        "attention": [{"attention": what, "layers": where} for what, where in layers_in_words(conversion.patches)],
        "state": state and dict(zip(("patched", "original", "length"), state, strict=True)),
        "weight_bytes": bytes_of_weights(model), "weight_files": files_of_weights(model, wanted.max_shard_size),
        "processors": beside, "written": not wanted.dry_run,
    }  # fmt: skip
    if wanted.max_positions is not None:
        document["max_positions"] = wanted.max_positions
    if config.cross is not None:
        document |= {"cross_layers": config.cross.num_layers, "converted_cross_layers": len(config.cross.converted)}
    return document


def write(
    model: PreTrainedModel, wanted: Wanted, conversion: Conversion, chosen: ChosenPlan | None,
    processors: Iterable[Any], modules: SentenceModel | None,
) -> dict[str, Any]:  # fmt: skip
    """Write model, tokenizer, plan, licence and card; return where the plan lies."""
    from ..atomic_io import write_text
    from ..cards import CARD_FILE, conversion_card

    if modules is not None:
        modules.save(model, wanted.output)
    model.save_pretrained(wanted.output, max_shard_size=wanted.max_shard_size)
    said = write_beside(wanted.output, wanted, conversion, chosen, processors, modules)
    write_text(wanted.output / CARD_FILE, str(conversion_card(conversion, name_in_card(wanted.output))))
    return said | {"card": str(wanted.output / CARD_FILE)}


def write_beside(
    folder: Path, wanted: Wanted, conversion: Conversion, chosen: ChosenPlan | None, processors: Iterable[Any],
    modules: SentenceModel | None,
) -> dict[str, Any]:  # fmt: skip
    """Write what lies beside a model and its card; return where the plan lies."""
    from ..sentence_models import keep_pair_files

    for processor in processors:
        processor.save_pretrained(folder)
    said = {} if chosen is None else save_beside(chosen, folder)
    if conversion.base.licence is not None:
        shutil.copyfile(conversion.base.licence, folder / conversion.base.licence.name)
    if modules is None:
        keep_pair_files("model", wanted.model, folder)
    return said


def files_beside(
    model: PreTrainedModel, wanted: Wanted, conversion: Conversion, chosen: ChosenPlan | None,
    processors: Iterable[Any], modules: SentenceModel | None,
) -> list[str]:  # fmt: skip
    """Return the names of what `write` writes but for the weights; they are found by writing it to nowhere."""
    with TemporaryDirectory() as nowhere:
        folder = Path(nowhere)
        if modules is not None:
            modules.save(None, folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        write_beside(folder, wanted, conversion, chosen, processors, modules)
        names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    return [*CONFIGS, *sorted(names.difference(CONFIGS))]


def name_in_card(output: Path) -> str:
    """Return the name under which a card says that its model is loaded: the folder, without a path of one machine."""
    return output.name if output.is_absolute() else output.as_posix()


def processors(model: str, max_length: int | None = None, modules: SentenceModel | None = None) -> dict[str, Any]:
    """Return what lies beside a model to make its inputs; the Auto classes invent a tokenizer where there is none.

    max_length: tokens of the longest input; None: as the tokenizer says. modules: have the tokenizer already.
    """
    found: dict[str, Any] = {}
    if modules is not None:
        found = {TOKENIZER_FILE: modules.tokenizer}
    else:
        if (tokenizer := find_tokenizer("model", model)) is not None:
            found[TOKENIZER_FILE] = tokenizer
        if file := next((file for file in PROCESSORS if is_there(model, file)), None):
            found[file] = read_processor(model, file, alone=not found)
    for tokenizer in map(tokenizer_of, found.values()):
        if max_length is not None and tokenizer is not None:
            tokenizer.model_max_length = max_length
    return found


def read_processor(model: str, file: str, alone: bool) -> Any:
    """Return what a file beside a model describes; alone: without a tokenizer, which `AutoProcessor` would invent."""
    import transformers
    from transformers.utils.hub import cached_file

    with reading("model", model, f"save the model with a {file} that can be read"):
        described = read_object(Path(cached_file(model, file) or file), "save it again")
        kinds = [kind for key, kind in KINDS_OF_PROCESSORS.items() if alone and key in described]
        return getattr(transformers, next(iter(kinds), "AutoProcessor")).from_pretrained(model)


def tokenizer_of(processor: Any) -> Any | None:
    """Return the tokenizer of a processor, which may be one itself; None: it has none, as that of images."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "model_max_length") else None
