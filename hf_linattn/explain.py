"""Which backend serves each layer of a patched model, and why the faster ones were passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention_call import AttentionCall, intercept_attention
from .config import require
from .inference import accepted, evaluation_mode, kept_generators, without_labels
from .mechanisms import Mechanism
from .ops.dispatch import Decision, recording
from .patching import get_mechanisms

PASSES = {"forward": "forward", "backward": "backward", "decode": "one token"}  # field of a row -> its title


@dataclass(frozen=True)
class BackendRow:
    """What one attention layer ran on.

    Attributes:
        path, index: where the layer is, and its number. mechanism: its name. policy: what `set_backend` chose.
        forward: the choices of a call without gradients, one for each operation that it needed and that has several
            backends; none where PyTorch's operations are the only ones. backward: those of a call in training, whose
            backend has its gradients, too. decode: those of one more token; None where the layer does not decode.
    """

    path: str
    index: int
    mechanism: str
    policy: str
    forward: tuple[Decision, ...]
    backward: tuple[Decision, ...]
    decode: tuple[Decision, ...] | None

    def backend(self, name: str) -> str:
        """Return what ran in the pass `name`, of `PASSES`: backends joined by +; "-" where there is no such pass."""
        decisions = getattr(self, name)
        if decisions is None:
            return "-"
        return "+".join(dict.fromkeys(decision.backend for decision in decisions)) or "torch"


@dataclass(frozen=True)
class BackendReport:
    """The rows of all layers; as text a table, and below it why the faster backends were passed over."""

    rows: tuple[BackendRow, ...]

    def reasons(self) -> dict[tuple[str, str, str, str], list[int]]:
        """Return (pass, operation, backend, reason) -> the numbers of the layers where it was passed over."""
        found: dict[tuple[str, str, str, str], list[int]] = {}
        for row in self.rows:
            for name in PASSES:
                for decision in getattr(row, name) or ():
                    for backend, reason in decision.passed_over.items():
                        layers = found.setdefault((name, decision.operation, backend, reason), [])
                        layers += [] if row.index in layers else [row.index]
        return found

    def document(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        rows = [
            {"path": row.path, "layer": row.index, "mechanism": row.mechanism, "policy": row.policy}
            | {name: row.backend(name) for name in PASSES}
            for row in self.rows
        ]
        names = ("pass", "operation", "backend", "reason")
        reasons = [dict(zip(names, key, strict=True)) | {"layers": x} for key, x in self.reasons().items()]
        return {"layers": rows, "passed over": reasons}

    def __str__(self) -> str:
        head = ("layer", "mechanism", "backend", *PASSES.values())
        rows = [(f"{x.index}", x.mechanism, x.policy, *map(x.backend, PASSES)) for x in self.rows]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        for (name, operation, backend, reason), layers in self.reasons().items():
            where = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
            lines.append(f"{PASSES[name]}, {operation}: not {backend} ({reason}), {where}")
        return "\n".join(line.rstrip() for line in lines)


def explain_backend(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> BackendReport:
    """Run a patched model once, and return which backend each of its attention layers takes and why no faster one.

    Every layer is asked what it is asked in a forward of these inputs: without gradients, with them in training, and
    for one more token (its last one again). What is shown is what was chosen then; nothing of the model changes. A
    model compiled by `torch.compile` takes PyTorch's operations in place of all that.

    Args:
        model: a patched model.
        inputs: what the model is called with, a dict or token ids [B, N]; labels are left out.

    Raises:
        PatchError: the model is not patched.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import explain_backend, patch_model, set_backend
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> model = set_backend(model, "torch")
        >>> print(explain_backend(model, torch.arange(9)[None]))
        layer  mechanism  backend  forward  backward  one token
        0      linear     torch    torch    torch     torch
        1      linear     torch    torch    torch     torch
    """
    mechanisms, rows = get_mechanisms(model), {}
    known = isinstance(inputs, (Tensor, Mapping))
    require("inputs", inputs, known, "token ids as a tensor, or a mapping of inputs, as a tokenizer returns it")
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else without_labels(inputs)

    def interceptor(path: str, mechanism: Mechanism, call: AttentionCall) -> Tensor:
        rows[path], output = _explain_layer(path, mechanism, call)
        return output

    interceptors: dict[str, Callable[[AttentionCall], Tensor]] = {
        path: partial(interceptor, path, mechanism) for path, mechanism in mechanisms.items()
    }
    counted = [x for mechanism in mechanisms.values() for x in mechanism.modules() if isinstance(x, Mechanism)]
    calls = [x.calls for x in counted]
    try:
        intercepted = intercept_attention(mechanisms, interceptors)
        with torch.inference_mode(False), torch.no_grad(), evaluation_mode(model), intercepted:
            # what a caller made in inference mode cannot be trained on
            given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
            model(**given, **accepted(model, use_cache=False))
    finally:
        for mechanism, count in zip(counted, calls, strict=True):
            mechanism.calls = count
    return BackendReport(tuple(rows[path] for path in mechanisms if path in rows))


def _explain_layer(path: str, mechanism: Mechanism, call: AttentionCall) -> tuple[BackendRow, Tensor]:
    """Return the row of one layer, which is in eval mode, and its output."""
    with recording() as forward:
        output = call.run(mechanism)
    kept = {name: x.clone() for name, x in mechanism.named_buffers()}
    with kept_generators(call.query.device), evaluation_mode(mechanism), torch.enable_grad():
        mechanism.train()
        heads = [x.detach().requires_grad_() for x in call[:3]]
        with recording() as backward:
            trained = call._replace(query=heads[0], key=heads[1], value=heads[2]).run(mechanism)
            torch.autograd.grad(trained.float().sum(), heads, allow_unused=True)
    with torch.no_grad():
        for name, x in mechanism.named_buffers():
            x.copy_(kept[name])
    layer = mechanism.layer
    chosen = (tuple(forward), tuple(backward), _decode(mechanism, call) if layer.mode == "causal" else None)
    return BackendRow(path, layer.index, mechanism.config.mechanism, mechanism.backend, *chosen), output


def _decode(mechanism: Mechanism, call: AttentionCall) -> tuple[Decision, ...]:
    """Return the choices made for one more token."""
    _, state = mechanism(*call[:5], **call.options(mechanism))
    last: Sequence[Tensor] = [x[:, :, -1:] for x in call[:3]]
    one = call._replace(hidden_states=None if call.hidden_states is None else call.hidden_states[:, -1:])
    with recording() as decisions:
        mechanism(*last, None, None, state, **one.options(mechanism))
    return tuple(decisions)
