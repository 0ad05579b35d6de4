"""What the operands of each function of the C must be: the C itself checks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import OperandError

MOST = 2**31  # rows, columns and tokens that the C counts in int are fewer
DTYPES = {
    "any": (torch.float32, torch.bfloat16, torch.float16),  # `enum kind` of tensor.h
    "wide": (torch.float32,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}


class Form(NamedTuple):
    """What an operand must be.

    dtypes: what its numbers may be. layout: "rows" where the numbers of a row lie side by side, "dense" where all do,
    "spread" where that does not matter. dims: a name for each dimension, the same size wherever the name stands; with
    `?` it may be one, with `+` it may be more. written: whether the C writes into it.
    """

    dtypes: tuple[torch.dtype, ...]
    layout: str
    dims: tuple[str, ...]
    written: bool

    @classmethod
    def of(cls, text: str) -> Form:
        """Read one from its line: dtypes, `>` if it is written, layout, dimensions."""
        kind, layout, *dims = text.split()
        return cls(DTYPES[kind.rstrip(">")], layout, tuple(dims), kind.endswith(">"))


def forms(**lines: str) -> dict[str, Form]:
    """Read the forms of all operands of a function."""
    return {name: Form.of(line) for name, line in lines.items()}


# B rows of N tokens, H heads of keys with G queries each, D and V numbers of a key and a value
HEADS = {"query": "any rows B H G N D", "key": "any rows B H N D", "value": "any rows B H N V"}
MAPS = {
    "query_weight": "wide rows H G D P+", "query_bias": "wide rows H G M",
    "key_weight": "wide rows H G? D P+", "key_bias": "wide rows H G? M",
}  # fmt: skip
SCALES = {"log_scale": "wide spread B H N", "log_decay": "wide spread B H N"}
STATES = {
    "state": "wide dense B H K W", "log_max": "wide dense B H",
    "state_after": "wide> dense S H K W", "log_max_after": "wide> dense S H",
}  # fmt: skip
PACKED = {"packed": "int64 dense R 3", "checkpoints": "wide> dense X+ H Y"}
BLOCKS = {
    **HEADS, "out": "any> rows B H G N V", "log": "wide> spread B H G N", "before": "any rows B H G L+ V",
    "before_log": "wide spread B H G L+", "shared_key": "any rows B H S D", "shared_value": "any rows B H S V",
    "gate": "wide dense H G", "bias": "wide rows B? T? Q? C? K", "table": "int64 dense T Q? E",
}  # fmt: skip
BUCKETS = {
    "query": "wide rows B H G N D", "key": "wide rows B H N D", "value": "wide rows B H N V",
    "log": "wide> spread B H G N", "of_query": "int32 dense R B Q N", "of_key": "int32 dense R B H N",
    "member": "int32> dense R B H N", "bounds": "int32> dense R B H E",
}  # fmt: skip
SEGMENTS = {
    "mean": "wide> rows B H T D", "row": "wide rows B H L+ D", "weight": "wide spread B H L+",
    "total": "wide> spread B H T",
}  # fmt: skip
DELTA = {
    "query": "any rows B H G N D", "key": "any rows B H N D", "value": "any rows B H N V",
    "beta": "wide spread B H N", "log_gate": "wide spread B H N",
}  # fmt: skip
DELTA_STEP = {"state": "wide dense B H D V", "state_after": "wide> dense B H D V", "out": "any> rows B H G N V"}
FORMS: dict[str, dict[str, Form]] = {
    "causal_step": forms(
        **{name: line.replace("any", "wide") for name, line in HEADS.items()}, **SCALES, **STATES, **MAPS,
        sums="wide> rows B H G N V", factor="wide> spread B H G N", top="wide> spread B H G N",
    ),
    "causal_sums": forms(
        **HEADS, **SCALES, **STATES, **MAPS, **PACKED, sums="any> rows B H G N V", row_scale="wide spread B H G N",
        factor="wide> spread B H G N", top="wide> spread B H G N",
    ),
    "causal_sums_backward": forms(
        **HEADS, **SCALES, **STATES, **MAPS, **PACKED, sums="any rows B H G N V", factor="wide spread B H G N",
        d_sums="any rows B H G N V", d_log="wide spread B H G N", d_query="any> rows B H G N D",
        d_key="any> rows B H N D", d_value="any> rows B H N V", d_scale="wide> spread B H N",
        d_query_weight="wide> dense B H G D M", d_query_bias="wide> dense B H G M", d_key_weight="wide> dense B H D M",
        d_key_bias="wide> dense B H M", d_state="wide dense S H K W", d_before="wide> dense B H K W",
    ),
    "block_softmax": forms(**BLOCKS),
    "block_softmax_backward": forms(
        **BLOCKS, grad="any rows B H G N V", log_grad="wide spread B H G N", d_query="any> rows B H G N D",
        d_key="wide> rows B H N D", d_value="wide> rows B H N V", d_before="any> rows B H G L+ V",
        d_before_log="wide> spread B H G L+", d_gate="wide> spread B H G L+",
        d_shared_key="wide> rows B H S D", d_shared_value="wide> rows B H S V",
    ),
    "bucket_softmax": forms(**BUCKETS, out="wide> rows B H G N V"),
    "bucket_softmax_backward": forms(
        **BUCKETS, grad="wide rows B H G N V", weight_grad="wide spread B H G N", d_query="wide> rows B H G N D",
        d_key="wide> rows B H N D", d_value="wide> rows B H N V",
    ),
    "segment_means": forms(**SEGMENTS),
    "segment_means_backward": forms(
        **SEGMENTS, d_mean="wide rows B H T D", d_row="wide> rows B H L+ D", d_weight="wide> spread B H L+",
        d_total="wide spread B H T",
    ),
    "delta_rule": forms(**DELTA, **DELTA_STEP, checkpoints="wide> dense X B H D V"),
    "delta_rule_step": forms(**DELTA, **DELTA_STEP),
    "delta_rule_backward": forms(
        **DELTA, state=DELTA_STEP["state"], checkpoints="wide dense X B H D V", d_out="any rows B H G N V",
        d_query="any> rows B H G N D", d_key="any> rows B H N D", d_value="any> rows B H N V",
        d_beta="wide> spread B H N", d_log_gate="wide> spread B H N", d_state="wide dense B H D V",
        d_before="wide> dense B H D V",
    ),
    "hard_keys": forms(
        **HEADS, **MAPS, out="any> rows B H G N V", start="int64 dense B", end="int64 dense B",
        ring_key="any rows B H E D", ring_value="any rows B H E V", sink_key="any rows B H S D",
        sink_value="any rows B H S V", hard_key="any rows B H J D", hard_value="any rows B H J V",
        hard_position="int64 dense B H J", state="wide dense B H K W", log_max="wide dense B H",
        state_after="wide> dense B H K W", log_max_after="wide> dense B H", hard_key_after="any> rows B H J D",
        hard_value_after="any> rows B H J V", hard_position_after="int64> dense B H J", log_mix="wide dense H G",
        gate="wide dense H G", sink="wide dense H G", rate="wide dense H", query_features="wide rows B H G N K",
        key_features="wide rows B H X K", key_beta="wide spread B H X", key_gate="wide spread B H X",
    ),
}  # fmt: skip
TOGETHER = (  # operands of which the C takes the first as a sign that the others are there
    ("state", "log_max"), ("query_weight", "key_weight"), ("before", "before_log"), ("factor", "top"),
    ("before", "d_before"), ("before", "d_before_log"), ("gate", "d_gate"), ("log_gate", "d_log_gate"),
    ("ring_key", "ring_value"), ("ring_key", "hard_key"), ("ring_key", "hard_value"), ("ring_key", "hard_position"),
    ("ring_key", "state"), ("key_features", "key_beta"),
)  # fmt: skip
OPTIONAL = frozenset((
    "log_scale", "log_decay", "row_scale", "state", "log_max", *MAPS, *PACKED, "before", "before_log", "gate", "bias",
    "d_log", "d_query_weight", "d_query_bias", "d_key_weight", "d_key_bias", "d_state", "d_before", "d_before_log",
    "d_gate", "log_gate", "d_log_gate", "ring_key", "ring_value", "hard_key", "hard_value", "hard_position", "sink",
    "rate", "query_features", "key_features", "key_beta", "key_gate",
))  # fmt: skip
NEEDED = {"causal_step": {"state", "log_max"}, "delta_rule_step": {"state"}}
ABSENT = {"causal_step": {"factor", "top"}}  # what may be so there


def check(function: str, seen: Sequence[tuple[str, Any]], given: Sequence[tuple[str, int]]) -> None:
    """Raise `OperandError` unless the operands of a call fit each other and what the C expects of them.

    seen: (name, (shape, stride, dtype)) of each by its name in `FORMS`; (name, None) where there is none. given: what
    the call says of dimensions of forms.
    """
    sizes, known = dict(given), FORMS[function]
    found = {name: what for name, what in seen if what is not None}
    _check_presence(function, found, known)
    for name, (shape, stride, dtype) in found.items():
        form = known[name]
        if dtype not in form.dtypes:
            raise OperandError(f"{function}: {name!r} is {dtype}, which must be {' or '.join(map(str, form.dtypes))}")
        _check_sizes(function, name, shape, form, sizes)
        _check_layout(function, name, shape, stride, form)


def _check_presence(function: str, found: Mapping[str, Any], known: Mapping[str, Form]) -> None:
    """Compare what is there with what must be."""
    optional = (OPTIONAL - NEEDED.get(function, set())) | ABSENT.get(function, set())
    for name in known:
        if name not in found and name not in optional:
            raise OperandError(f"{function}: there is no {name!r}; hand one over")
    for names in TOGETHER:
        if len({name in found for name in names if name in known}) > 1:
            raise OperandError(f"{function} takes {' and '.join(map(repr, names))} together; hand over all or none")
    for name in MAPS:
        if f"d_{name}" in found and name not in found:
            raise OperandError(f"{function}: there is no {name!r} for the gradient 'd_{name}'; hand it over")


def _check_sizes(function: str, name: str, shape: Sequence[int], form: Form, sizes: dict[str, int]) -> None:
    """Compare one with the sizes that are known, and remember those that were not."""
    expected, fits = [], len(shape) == len(form.dims)
    for count, dim in zip(shape, form.dims, strict=False):
        own = int(dim) if dim.isdecimal() else sizes.setdefault(dim.rstrip("?+"), count)
        right = count >= own if dim.endswith("+") else count == own or (dim.endswith("?") and count == 1)
        fits = fits and right and count < MOST
        expected.append(f"at least {own}" if dim.endswith("+") else f"{own} or 1" if dim.endswith("?") else f"{own}")
    if not fits:
        raise OperandError(
            f"{function}: {name!r} has shape {list(shape)}, which must be [{', '.join(expected)}]"
            f" ({' '.join(form.dims)}) to fit the other operands, each less than 2^31"
        )


def _check_layout(function: str, name: str, shape: Sequence[int], stride: Sequence[int], form: Form) -> None:
    if 0 in shape:  # nothing lies anywhere, and `contiguous` leaves the strides of such a tensor as they are
        return
    pairs = [(count, step) for count, step in zip(shape, stride, strict=True) if count != 1]
    if form.layout == "rows" and shape[-1] > 1 and stride[-1] != 1:
        raise OperandError(f"{function}: the last dimension of {name!r} has stride {stride[-1]}; make it contiguous")
    dense = 1
    for count, step in reversed(pairs):
        if form.layout == "dense" and step != dense:
            raise OperandError(f"{function}: {name!r} has strides {list(stride)}; make it contiguous")
        dense *= count
    if form.written and any(step == 0 and count > 1 for count, step in pairs):
        raise OperandError(f"{function} writes into {name!r}, whose strides {list(stride)} make rows share memory")
