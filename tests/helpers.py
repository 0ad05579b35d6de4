"""What several test files do with models."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks import render
from hf_linattn import get_mechanisms, patch_model, testing
from hf_linattn.attention_call import intercept_attention
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.mechanisms.learned_sparse import LearnedSparseMechanism
from hf_linattn.pinning import SHARED
from tests.models import ENCODERS, VOCAB_SIZE, make_model

# smaller than the defaults, for speed; a mechanism that is not named here is tested with its defaults
OPTIONS: dict[str, dict[str, Any]] = {"performer": {"num_features": 24}}
# one mechanism for each kind of state
STATES = ("linear", "hybrid", "local", "lsh", "linformer", "fusion", "softmax")
# and one for each kind of parameters beside these: maps of every head, projections and convolutions of the input
KINDS = (*STATES, "hedgehog", "gated_deltanet")
BOTH_WAYS = [name for name in MECHANISMS.names() if "bidirectional" in MECHANISMS.get(name).modes]


def is_plain_pattern(mechanism: str) -> bool:
    """Whether a mechanism is a choice of blocks and nothing else, as `local`, and `bigbird` for each head, are too."""
    found = MECHANISMS.get(mechanism)
    pattern = issubclass(found, BlockSparseMechanism) and not issubclass(found, LearnedSparseMechanism)
    plain = pattern and found.causal_sequences is BlockSparseMechanism.causal_sequences
    return plain and mechanism not in ("local", "bigbird")


def is_enough(architecture: str, mechanism: str) -> bool:
    """Whether one of them stands for the others."""
    return architecture in ("bert", "llama") or mechanism in STATES


def each_of(mechanisms: list[str]) -> list[Any]:
    """Return mechanisms as parameters, plain patterns marked slow: in a whole model all of them take the same way."""
    return [pytest.param(x, marks=[pytest.mark.slow] if is_plain_pattern(x) else []) for x in mechanisms]


def each_with(names: Iterable[str], mechanisms: list[str]) -> list[Any]:
    """Return architectures and mechanisms as parameters, each mechanism with the models whose form it has.

    A model meets a mechanism through heads, masks and states alone: every mechanism on one causal and one
    bidirectional architecture, and every architecture with one mechanism per kind of state, are enough. The others are
    marked exhaustive.
    """
    forms = {name: "bidirectional" if name in ENCODERS else "causal" for name in names}
    rest = {False: [pytest.mark.exhaustive], True: []}
    return [
        pytest.param(name, *mechanism.values, marks=[*mechanism.marks, *rest[is_enough(name, *mechanism.values)]])
        for mechanism in each_of(mechanisms)
        for name, form in forms.items()
        if form in MECHANISMS.get(mechanism.values[0]).modes
    ]


def one_of_each_kind(mechanisms: Iterable[str]) -> list[Any]:
    """Return mechanisms as parameters, those marked exhaustive for which one of `KINDS` stands."""
    return [pytest.param(x, marks=[] if x in KINDS else [pytest.mark.exhaustive]) for x in mechanisms]


def each_once(names: Sequence[str], mechanisms: Sequence[str]) -> list[Any]:
    """Return architectures and mechanisms as parameters: each mechanism with one model, in turns; the rest exhaustive.

    For what wraps a model, whatever its attention is, and has little of its own to do with an architecture.
    """
    cases = []
    for place, mechanism in enumerate(each_of([*mechanisms])):
        modes = MECHANISMS.get(*mechanism.values).modes
        fitting = [name for name in names if ("bidirectional" if name in ENCODERS else "causal") in modes]
        for number, name in enumerate(fitting):
            rest = [] if number == place % len(fitting) else [pytest.mark.exhaustive]
            cases.append(pytest.param(name, *mechanism.values, marks=[*mechanism.marks, *rest]))
    return cases


def each_kind(names: Iterable[str]) -> list[Any]:
    """Return architectures and mechanisms as parameters, one mechanism of each kind; the others are marked exhaustive.

    For what a model does with states and parameters, whatever they hold: it is saved, wrapped, generates, trains. The
    invariants have each mechanism decoded, saved, undone and differentiated.
    """
    cases = each_with(names, [*MECHANISMS.names()])
    rest = [pytest.mark.exhaustive]
    return [pytest.param(*x.values, marks=[*x.marks, *([] if x.values[1] in KINDS else rest)]) for x in cases]


def make_patched(name: str, mechanism: str = "performer", head: str | None = None, **config: Any) -> PreTrainedModel:
    """Return a tiny model of that architecture with all its layers patched."""
    return patch_model(make_model(name, head, **config), mechanism, **OPTIONS.get(mechanism, {}))


def make_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random token ids [batch, length] without special tokens."""
    return torch.randint(5, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words `w5` ... `w95` and the special tokens, ids as in the tiny models."""
    special = ["[PAD]", "[BOS]", "[SEP]", "[MASK]", "[UNK]"]
    vocabulary = {token: i for i, token in enumerate([*special, *(f"w{i}" for i in range(len(special), VOCAB_SIZE))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", sep_token="[SEP]", mask_token="[MASK]",
        unk_token="[UNK]", padding_side="left",
    )  # fmt: skip


def pad(rows: list[Tensor], value: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """Return padded rows [B, N] and their attention mask."""
    length = max(map(len, rows))
    widths = [(length - len(row), 0) if side == "left" else (0, length - len(row)) for row in rows]
    padded = [nn.functional.pad(row, width, value=value) for row, width in zip(rows, widths, strict=True)]
    masks = [nn.functional.pad(torch.ones_like(row), width) for row, width in zip(rows, widths, strict=True)]
    return torch.stack(padded), torch.stack(masks)


@torch.no_grad()
def generate(model: PreTrainedModel, ids: Tensor, new_tokens: int = 5, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the new tokens [B, n] and the logits [B, n, V] they were chosen from."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    result = model.generate(
        ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True,
        **options,
    )  # fmt: skip
    return result.sequences[:, ids.shape[1] :], torch.stack(result.logits, dim=1)


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model(input_ids=ids, **options).logits


class OnCpu(Tensor):
    """What was taken to the CPU, and what came of it there."""


class WithoutFloat64(TorchFunctionMode):
    """A device that has no float64, as Apple's GPUs: a `TypeError` where a tensor of it is made but on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function is Tensor.cpu:
            return result.as_subclass(OnCpu)
        if function is Tensor.to and result.dtype != torch.float64:
            return result.as_subclass(Tensor)  # which may be taken back
        made = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(result))
        if made and not any(isinstance(x, OnCpu) for x in tree_leaves((args, kwargs))):
            raise TypeError(f"{function.__name__} makes float64 on a device that has none")
        return result


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def nearest(codes: Tensor, key: Tensor) -> int:
    """Return the number of the code [C, D] that lies nearest to a key [D]."""
    return int((codes - key).norm(dim=-1).argmin())


def take_steps(model: nn.Module, count: int) -> list[float]:
    """Train as `Trainer` does, without what it sets up; return the loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = make_tokens(8, 12), []
    model.train()
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_gradients(model, ids, **options):
    """Return the gradients of the model's own loss on these tokens."""
    model.zero_grad()
    model(input_ids=ids, labels=ids, **options).loss.backward()
    return gradients(model)


@dataclass
class Snapshot:
    """Everything about a model that an undone or refused patch must leave as it was."""

    logits: Tensor
    structure: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, logits: Tensor | None = None) -> Snapshot:
        if logits is None:
            ids = make_tokens(2, 9)
            inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            logits = logits_of(model, ids, **inputs)
        structure = {path: _facts(module) for path, module in model.named_modules()}
        config = model.config
        structure["config"] = (config.to_json_string(use_diff=False), type(config), sorted(vars(config)))
        return cls(logits, structure, {name: tensor.clone() for name, tensor in model.state_dict().items()})

    def assert_kept(self, model: PreTrainedModel) -> None:
        """Compare bit for bit with the model as it is now."""
        now = Snapshot.of(model)
        assert now.structure == self.structure
        assert list(now.tensors) == list(self.tensors)
        assert all(torch.equal(now.tensors[name], tensor) for name, tensor in self.tensors.items())
        assert torch.equal(now.logits, self.logits)


def _facts(module: nn.Module) -> dict[str, Any]:
    """Class, attributes, hooks and attention implementation of one module."""
    hooks = {name: list(value.values()) for name, value in vars(module).items() if name.endswith("_hooks") and value}
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    attributes = sorted(set(vars(module)) - {SHARED})  # that a model once had another config is all that stays
    return {
        "class": type(module), "attributes": attributes, "hooks": hooks, "implementation": implementation,
        "children": list(module._modules), "buffers": list(module._buffers), "training": module.training,
    }  # fmt: skip


def pages_with_markers(root: Path, body: str = "") -> Path:
    """Write the pages that have tables of results, with `body` in every section; return their folder."""
    docs = root / "docs"
    docs.mkdir()
    for name, sections in render.SECTIONS.items():
        marked = [f"<!-- {section}:begin -->\n{body}\n<!-- {section}:end -->\n" for section in sections]
        (docs / name).write_text("before\n" + "between\n".join(marked) + "after\n")
    return docs


def watch_models(monkeypatch: Any, command: str) -> list[int]:
    """Return a list that gets, whenever a command reads a model, how many of those before are still in memory."""
    module = import_module(f"hf_linattn.cli.{command}")
    read, alive, left = module.read_language_model, weakref.WeakSet(), []  # type: ignore[var-annotated]

    def watched(*arguments: Any) -> Any:
        left.append(len(alive))
        alive.add(model := read(*arguments))
        return model

    monkeypatch.setattr(module, "read_language_model", watched)
    return left


def ask_only(monkeypatch, *names: str) -> None:
    """Have `check_mechanism` ask for these invariants alone for a while; the tables themselves keep their order."""
    for table in ("INVARIANTS", "CROSS_INVARIANTS"):
        known = getattr(testing, table)
        monkeypatch.setattr(testing, table, {name: check for name, check in known.items() if name in names})


@torch.no_grad()
def layer_errors(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Measure what calibration is about, without it: outputs of both attentions on the original model's heads."""
    mechanisms, errors = get_mechanisms(model), []

    def watch(mechanism):
        def answer(call):
            target = call.run_softmax(mechanism)
            errors.append(float((call.run(mechanism) - target).square().sum() / target.square().sum()))
            return target

        return answer

    with intercept_attention(mechanisms, {path: watch(mechanism) for path, mechanism in mechanisms.items()}):
        model(**batch, use_cache=False)
    return errors


def directions_of(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the random directions of each layer's `performer`."""
    return [mechanism.feature_map.projection.clone() for mechanism in get_mechanisms(model).values()]
