"""Mutants: one line of the library made wrong at a time, which the tests of that part must notice.

    python -m tests.mutants                      # all that were not run yet; results in build/mutants/results.json
    python -m tests.mutants --only cache         # those whose name has "cache"
    python -m tests.mutants --random 100         # operators swapped at seeded places of ops, cache and bridge

Each runs in a copy of the checkout under build/mutants, whose C is built again where it was changed. A mutant is killed
by a test that fails, a crash, a build that fails or a run that takes MOST_SECONDS. Survivors end the run with 1, but for
those that EQUIVALENT says nothing can tell from the library.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_linattn.ops.runtime.cpu import has_matrix_unit
from tests.fork_server import ForkServer
from tests.quick_build import build

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
COPIED = ("hf_linattn", "tests", "docs", "benchmarks", "recipes", "pyproject.toml", "setup.py", "conftest.py")
MOST_SECONDS = 200
SEED = 0
TIMES = itertools.count(1)  # of files, by which Python knows what it has compiled: no two mutants have the same

LINEAR = "tests/ops/linear/test_torch.py tests/mechanisms/test_linear.py tests/mechanisms/test_recurrences.py"
NATIVE_LINEAR = "tests/ops/linear/test_cpu.py"
NAMED = "tests/invariants tests/mechanisms/test_edges.py tests/mechanisms/test_softmax_type.py"  # with the name of a mechanism
BRIDGE = "tests/test_masks.py tests/test_transformers_bridge.py tests/test_integration.py tests/test_cache.py"


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands in `file`, becomes `new`; `tests` are to notice: arguments of pytest, of several runs by "&&"."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    line: str = ""  # of the file, as it becomes


def _ops(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, f"hf_linattn/ops/{file}", old, new, tests)


def _csrc(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, f"hf_linattn/csrc/{file}", old, new, tests)


MUTANTS = [
    # linear attention by PyTorch
    _ops("the next key is seen", "linear/torch.py", "tril_(-1 if strict else 0)", "tril_(0 if strict else 1)", LINEAR),
    _ops("the next scale is seen", "linear/torch.py", "triu(0 if strict else 1)", "triu(1 if strict else 2)", LINEAR),
    _ops("the state is not rescaled", "linear/torch.py", "left = fast_exp(log_left if packing is None", "left = torch.ones_like(log_left) if packing is None else fast_exp(log_left if packing is None", LINEAR),
    _ops("a border of packed rows is lost", "linear/torch.py", "other = ids[..., :, None] != ids[..., None, :]", "other = torch.zeros_like(ids[..., :, None] != ids[..., None, :])", LINEAR),
    _ops("the state crosses a border", "linear/torch.py", "last == previous)", "last == last)", LINEAR),
    _ops("the decay of a chunk is lost", "linear/torch.py", "passed = None if decay is None else decay[..., -1]", "passed = None if decay is None else decay[..., -1] * 0", LINEAR),
    _ops("pads weigh in the normaliser", "linear/types.py", "values = values.masked_fill(hidden[..., None], 0.0)", "values = values", LINEAR),
    _ops("pads count in the maximum", "linear/types.py", "log_scale = None if log_scale is None else log_scale.masked_fill(hidden, LOWEST)", "log_scale = log_scale", "tests/mechanisms/test_edges.py -k pads"),
    _ops("the weight is a value", "linear/torch.py", "value.new_ones(*value.shape[:-1], 1)", "value.new_zeros(*value.shape[:-1], 1)", LINEAR),
    _ops("a group is another one's", "linear/types.py", "return self.query.unflatten(1, (self.key.shape[1], -1))", "return self.query.unflatten(1, (-1, self.key.shape[1])).transpose(1, 2)", LINEAR),
    _ops("what was lost by chunks counts twice", "linear/torch_open_length.py", ".double() - lost.detach()", ".double() + lost.detach()", "tests/ops/linear/test_torch.py -k passage"),
    # the delta rule
    _ops("the delta rule forgets what it knew", "delta_rule/torch.py", "(value[:, :, t] - known)", "value[:, :, t]", "tests/mechanisms/test_recurrences.py"),
    _ops("a gate is left out", "delta_rule/torch.py", "memory * log_gate.exp()[..., None]", "memory", "tests/mechanisms/test_recurrences.py tests/invariants -k deltanet"),
    # the choice of a backend
    _ops("backends are asked in another order", "dispatch.py", '"auto": ("triton", "cpu", "torch")', '"auto": ("triton", "torch", "cpu")', "tests/test_dispatch.py"),
    _ops("what is recorded is not what runs", "dispatch.py", "Decision(self.name, name, passed_over)", "Decision(self.name, self.order(call)[0], passed_over)", "tests/test_dispatch.py"),
    _ops("the C runs where it is watched", "dispatch.py", 'WATCHED if watched and name != "torch" else absent(name, call)', "absent(name, call)", "tests/test_dispatch.py"),
    _ops("the C has no gradients of open segments", "slots/cpu.py", "return causal_blocks.open_in_training(call)", "return None", "tests/test_dispatch.py tests/ops/slots/test_cpu.py"),
    # padding, sequences, precision
    _ops("pads stay in front", "common/padding.py", "order = (~real).long().argsort", "order = real.long().argsort", "tests/ops/common/test_padding.py"),
    _ops("what stands behind is kept", "common/padding.py", "x.shape[3])) * present for x", "x.shape[3])) for x", "tests/ops/common/test_padding.py"),
    _ops("rows begin blocks in different places", "common/padding.py", "if len(lengths) == 1 and first", "if len(lengths) == 1 or first", "tests/ops/common/test_padding.py"),
    _ops("a token copies all keys", "common/exact_softmax.py", "if query.shape[2] > 1:", "if query.shape[2] >= 1:", "tests/ops/common/test_exact_softmax.py"),
    _ops("sequences of a row are one", "common/padding.py", "begins[1:] = (rows[1:] != rows[:-1]) | (", "begins[1:] = (rows[1:] != rows[:-1]) & (", "tests/ops/common/test_padding.py tests/mechanisms"),
    _ops("gradients of parts replace each other", "common/grad_accumulator.py", "part.add_(add)", "part.copy_(add)", "tests/ops/common/test_grad_accumulator.py"),
    # softmax over blocks, slots and buckets
    _ops("a bias of blocks shows the next key", "block_softmax/patterns.py", "allowed & (columns <= rows)", "allowed & (columns <= rows + 1)", "tests/mechanisms tests/ops/block_softmax/test_cpu.py"),
    _ops("pads of blocks are seen", "block_softmax/patterns.py", "bias = bias.masked_fill(behind, LOWEST)", "bias = bias", "tests/mechanisms/test_block_sparse.py tests/invariants -k bigbird"),
    _ops("a gate is not saved", "block_softmax/autograd.py", "None if d_gate is None else d_gate.sum((0, 3))", "None", "tests/ops/block_softmax/test_cpu.py"),
    _ops("the gradient of the log is lost", "block_softmax/autograd.py", "output, log, grad, log_grad, d_query", "output, log, grad, torch.zeros_like(log), d_query", "tests/ops/block_softmax/test_cpu.py"),
    _ops("slots do not count their tokens", "slots/pooling.py", ".to(query.dtype).log().masked_fill", ".to(query.dtype).mul(0).masked_fill", "tests/mechanisms/test_linformer.py"),
    _ops("seeds are drawn where codes are", "slots/vq.py", "(points - nearest).square()", "(points + nearest).square()", "tests/mechanisms/test_vq_codebook.py -k seeds"),
    _ops("segments grow too early", "slots/segment_pool.py", "1 << (max(-(-tokens // num_slots), 1) - 1).bit_length()", "1 << max(-(-tokens // num_slots), 1).bit_length()", "tests/mechanisms/test_linformer.py"),
    # hybrid
    _ops("distance costs nothing", "hybrid/fused.py", "log - (rate * weights.window_size)", "log - 0 * (rate * weights.window_size)", "tests/ops/hybrid/test_cpu.py tests/ops/hybrid/test_torch.py"),
    _ops("the far part begins a token early", "hybrid/fused.py", "start, sources = window + sinks, [", "start, sources = window + sinks - 1, [", "tests/ops/hybrid/test_cpu.py"),
    _ops("thin features drown the window", "hybrid/sums.py", "part.log.detach() + part.weight", "part.log.detach() - part.weight", "tests/ops/hybrid/test_torch.py"),
    Mutant("a window is a token wider", "hf_linattn/mechanisms/hybrid.py", "(pairs.distance < self.config.window_size)", "(pairs.distance <= self.config.window_size)", "tests/training/test_transfer.py"),
    # the delta rule and hard keys
    _csrc("delta rule in C: a key corrects the next one alone", "delta_rule/delta_rule.h", "for (int64_t j = 0; j < i; j++)\n            factor[j]", "for (int64_t j = i > 0 ? i - 1 : 0; j < i; j++)\n            factor[j]", "tests/ops/delta_rule/test_cpu.py"),
    _csrc("delta rule in C: a chunk forgets nothing", "delta_rule/delta_rule.h", "if (c->left != 1.0f)", "if (0)", "tests/ops/delta_rule/test_cpu.py"),
    _csrc("delta rule in C: a step forgets nothing", "delta_rule/delta_rule_fwd.c", "after[place] = left * before[place]", "after[place] = before[place]", "tests/ops/delta_rule/test_cpu.py"),
    _csrc("delta rule in C: the gradient of a key leaves out what it corrects", "delta_rule/delta_rule_bwd.c", "load(b->read + number) + load(b->written + number)", "load(b->written + number)", "tests/ops/delta_rule/test_cpu.py"),
    _ops("hard keys: the best recalled are kept", "hybrid/hard_keys.py", "descending=True, stable=True)[..., :most]", "stable=True)[..., :most]", "tests/mechanisms/test_hard_keys.py"),
    _ops("hard keys: what is none enters the state", "hybrid/hard_keys.py", "entering.position >= 0", "entering.position >= -1", "tests/mechanisms/test_hard_keys.py"),
    _ops("hard keys: blocks that are made again get the keys of the last one", "hybrid/hard_keys.py", "zip(*entering, strict=True)", "zip(*entering[-1:] * len(entering), strict=True)", "tests/mechanisms/test_hard_keys.py"),
    _csrc("hard keys in C: the last of equals are kept", "hybrid/hard_keys.c", "(numbers + (int32_t)j < (int32_t)own)", "(numbers + (int32_t)j > (int32_t)own)", "tests/ops/hybrid/test_cpu_hard_keys.py"),
    _csrc("hard keys in C: a call does not go on inside a block", "hybrid/hard_keys.c", "earlier = min_i64(count, start - position)", "earlier = position < start ? count : 0", "tests/ops/hybrid/test_cpu_hard_keys.py"),
    _csrc("hard keys in C: the state does not age as a block leaves", "hybrid/hard_keys.c", "const float before = s->log_max - rate * CHUNK;", "const float before = s->log_max;", "tests/ops/hybrid/test_cpu_hard_keys.py"),
    _csrc("hard keys in C: those of another block are met", "hybrid/hard_keys.c", "PLACES * (s->serial + at / PIECE + 1)", "PLACES * (at / PIECE + 1)", "tests/ops/hybrid/test_cpu_hard_keys.py"),
    _csrc("hard keys in C: by the delta rule a key is written as if nothing were known", "hybrid/hard_keys.c", "(load(at) - left * (known[part] + known[part + 2]))", "load(at)", "tests/ops/hybrid/test_cpu_hard_keys.py"),
    Mutant("delta rule: gates of pads count", "hf_linattn/mechanisms/gated_deltanet.py", "else (log_gate * real, beta * real)", "else (log_gate, beta * real)", "tests/mechanisms/test_gated_deltanet.py"),
    Mutant("delta rule: a tail ends with pads", "hf_linattn/mechanisms/gated_deltanet.py", "last = lengths[:, None] + torch", "last = count + 0 * lengths[:, None] + torch", "tests/mechanisms/test_gated_deltanet.py"),
    # the C
    _csrc("C: the next key is seen", "linear/linear.h", "memset(own + i + 1, 0, (s->chunk - 1 - i)", "if (i + 2 < s->chunk) memset(own + i + 2, 0, (s->chunk - 2 - i)", NATIVE_LINEAR),
    _csrc("C: a stale left tile is read", "common/products.h", "m->a->owner = NULL;", ";", NATIVE_LINEAR),
    _csrc("C: a stale right tile is read", "common/products.h", "m->b->owner = NULL;", ";", NATIVE_LINEAR),
    _csrc("C: tiles of another chunk are read", "common/products.h", "entry->owner == m && ", "entry->owner && ", NATIVE_LINEAR),
    _csrc("C: two maps have one weight", "linear/linear.h", "s->map_weights[map].data == data && ", "", NATIVE_LINEAR),
    _csrc("C: sums are as coarse as their factors", "common/products.h", "m->fine ? max_i64(parts, 2) : parts", "parts", "tests/ops/test_cpu_half_precision.py"),
    _csrc("C: scores keep their sums unscaled", "common/online_softmax.h", "load(s->weight + group * LANES) * left", "load(s->weight + group * LANES)", "tests/ops/block_softmax/test_cpu.py"),
    _csrc("C: a gate is squared", "block_softmax/block_softmax_fwd.c", "share = shares.most * shares.joint", "share = shares.most * shares.most * shares.joint", "tests/ops/block_softmax/test_cpu.py"),
    _csrc("C: a gate's gradient lacks its share", "block_softmax/block_softmax_bwd.c", "d_gate = shares.joint / kept", "d_gate = 1.0f / kept", "tests/ops/block_softmax/test_cpu.py"),
    _csrc("C: a key of its own block too many", "block_softmax/block_softmax.h", "first == start ? at - place : p->length", "first == start ? at - place + 1 : p->length", "tests/ops/block_softmax/test_cpu.py"),
    _csrc("C: the last weight of a segment is lost", "slots/segment_mean.c", "top = LOWEST, sum = 0.0f", "top = LOWEST, sum = 1.0f", "tests/ops/slots/test_cpu.py tests/mechanisms/test_linformer.py"),
    _ops("C: places of packed rows are not checked", "runtime/cpu.py", "if failed == BAD_NUMBERS:", "if False:", "tests/ops/runtime/test_operands.py tests/ops/linear/test_cpu.py tests/test_operands.py"),
    _ops("C: another build is called", "runtime/cpu.py", "if found != list(layout := layout_of(problem)):", "if False:", "tests/ops/runtime/test_cpu.py -k another_version"),
    _ops("C: dtypes are not checked", "runtime/operands.py", "if dtype not in form.dtypes:", "if False:", "tests/ops/runtime/test_operands.py"),
    # bridge and cache
    Mutant("beams are not reordered", "hf_linattn/cache.py", "lambda t: t.index_select(0, beam_idx.to(t.device))", "lambda t: t", "tests/test_cache.py tests/test_integration.py"),
    Mutant("a cache counts one token", "hf_linattn/cache.py", "self.seq_length += self.handed", "self.seq_length += 1", "tests/test_cache.py tests/test_integration.py"),
    Mutant("what was handed out cannot be read", "hf_linattn/cache.py", "self.is_initialized and not self.expected", "self.is_initialized or not self.expected", "tests/test_cross_attention.py"),
    Mutant("what softmax had cached is lost", "hf_linattn/cache.py", "torch.cat([old.to(new), new], dim=-2)", "new", "tests/test_cache.py tests/test_integration.py"),
    Mutant("a state of another mechanism is read", "hf_linattn/cache_layers.py", "            layers[index].require_own(mechanism)\n", "            pass\n", "tests/test_cache.py"),
    Mutant("a padding mask is cut at its end", "hf_linattn/masks.py", "first: Any = sizes.key_offset", "first: Any = 0", "tests/test_masks.py"),
    Mutant("a padding mask is left out", "hf_linattn/masks.py", "else Masks(keys=once(_key_mask, mask, num_keys, batch))", "else Masks()", BRIDGE),
    Mutant("another scaling is left out", "hf_linattn/attention_call.py", "return query * (scaling / mechanism.layer.scaling)", "return query", "tests/test_transformers_bridge.py tests/test_architectures.py"),
    Mutant("packed rows are one", "hf_linattn/masks.py", "restart = (fall | stay & first", "restart = (stay & first", BRIDGE),
    Mutant("a window in the mask is lost", "hf_linattn/transformers_bridge.py", "sliding_window = masked_window(module)", "sliding_window = None", "tests/test_masks.py"),
    # training, saving
    Mutant("a divergence is turned around", "hf_linattn/training/losses/distillation.py", "(want.exp() * (want - got)).sum()", "(got.exp() * (got - want)).sum()", "tests/training/test_distillation.py"),
    Mutant("a temperature is not squared", "hf_linattn/training/losses/distillation.py", "self.temperature**2", "self.temperature", "tests/training/test_distillation.py"),
    Mutant("a transfer counts one head", "hf_linattn/training/losses/attention_transfer.py", "total / (count * call.query.shape[1])", "total / count", "tests/training/test_transfer.py"),
    Mutant("damaged files are not looked for", "hf_linattn/training/checkpoints.py", "    yield from damaged(path)\n    try:", "    try:", "tests/training/test_checkpoints.py"),
    Mutant("options of a run may change", "hf_linattn/training/same_run.py", "if started.get(name, default) != now.get(name, default):", "if False:", "tests/training/test_same_run.py"),
    Mutant("an interrupted save mixes two models", "hf_linattn/saving.py", "os.replace(write_text(aside / \"unfinished\", unfinished), folder / config)", "pass", "tests/test_saving.py"),
]  # fmt: skip

# of tiles that products of a matrix unit alone have: a processor without one runs none of these lines
OF_THE_UNIT = {
    "C: a stale left tile is read", "C: a stale right tile is read", "C: tiles of another chunk are read",
    "C: sums are as coarse as their factors", "hard keys in C: those of another block are met",
}  # fmt: skip
# where operators are swapped at random, and what must notice
FOLDERS = {
    "hf_linattn/ops/linear": f"{LINEAR} {NATIVE_LINEAR} tests/test_derivatives.py",
    "hf_linattn/ops/hybrid": f"tests/ops/hybrid/test_torch.py tests/ops/hybrid/test_cpu.py tests/mechanisms/test_hybrid.py && {NAMED} -k hybrid",
    "hf_linattn/ops/block_softmax": f"tests/ops/block_softmax/test_cpu.py tests/ops/block_softmax/test_decode.py tests/mechanisms/test_block_sparse.py tests/mechanisms/test_streaming.py && {NAMED} -k 'local or bigbird or longformer or learned_sparse or fixed'",
    "hf_linattn/ops/slots": f"tests/ops/slots/test_cpu.py tests/ops/test_cpu_flops.py tests/mechanisms/test_linformer.py && {NAMED} -k linformer",
    "hf_linattn/ops/lsh": f"tests/ops/lsh/test_cpu.py tests/ops/test_cpu_flops.py tests/mechanisms/test_lsh.py && {NAMED} -k lsh",
    "hf_linattn/ops/delta_rule": f"tests/mechanisms/test_recurrences.py {NAMED} -k deltanet",
    "hf_linattn/ops/common": "tests/ops/common/test_exact_softmax.py tests/ops/common/test_padding.py tests/ops/common/test_grad_accumulator.py tests/ops/linear/test_torch.py tests/ops/block_softmax/test_cpu.py tests/mechanisms/test_block_sparse.py tests/mechanisms/test_linear.py tests/mechanisms/test_performer.py && tests/mechanisms/test_softmax_type.py tests/test_tracing.py -k 'softmax or local or linear or traced'",
    "hf_linattn/cache.py": "tests/test_cache.py tests/test_integration.py tests/test_cross_attention.py",
    "hf_linattn/transformers_bridge.py": BRIDGE,
}  # fmt: skip
# files that have tests of their own
FILES = {
    "hf_linattn/ops/common/growing.py": "tests/mechanisms/test_exact_heads.py",
    "hf_linattn/ops/hybrid/cpu_kernels.py": "tests/ops/test_cpu_flops.py tests/ops/hybrid/test_cpu.py tests/ops/hybrid/test_cpu_hard_keys.py",
    "hf_linattn/ops/hybrid/hard_keys.py": "tests/mechanisms/test_hard_keys.py",
    "hf_linattn/ops/hybrid/mixed_chunk.py": f"tests/mechanisms/test_mixed_chunk.py && {NAMED} -k mixed_chunk",
    "hf_linattn/ops/linear/attention_distance.py": "tests/ops/linear/test_attention_distance.py tests/mechanisms/test_linear.py",
    "hf_linattn/ops/linear/cpu.py": f"tests/ops/runtime/test_operands.py tests/test_operands.py {NATIVE_LINEAR}",
    "hf_linattn/ops/linear/cpu_kernels.py": f"tests/ops/test_cpu_flops.py tests/ops/runtime/test_operands.py tests/test_operands.py {NATIVE_LINEAR}",
    "hf_linattn/ops/linear/ridge.py": "tests/mechanisms/test_ridge.py",
    "hf_linattn/ops/linear/torch_open_length.py": f"tests/test_tracing.py -k 'lengths or linear or traced' && {LINEAR}",
    "hf_linattn/ops/slots/nystrom.py": f"tests/mechanisms/test_nystrom.py && {NAMED} -k nystrom",
    "hf_linattn/ops/slots/pooling.py": f"tests/mechanisms/test_linformer.py tests/mechanisms/test_nystrom.py && {NAMED} -k linformer",
    "hf_linattn/ops/slots/vq.py": f"tests/mechanisms/test_vq.py tests/mechanisms/test_vq_codebook.py && {NAMED} -k vq",
}  # fmt: skip
# what nothing can tell from the library: file, the line that the mutant has, and why
EXACT_PARTS = "a choice of speed: products in parts have all digits, too"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("hf_linattn/ops/block_softmax/cpu.py", 'parts = product_parts(operands["query"], exact=shared + width / size >= LEAST_KEYS)'): EXACT_PARTS,
    ("hf_linattn/ops/block_softmax/cpu.py", 'parts = product_parts(operands["query"], exact=shared - width * size >= LEAST_KEYS)'): EXACT_PARTS,
    ("hf_linattn/ops/block_softmax/decode.py", "parts = [_after(part, begun) for part in make_parts(query, key, pattern, size, end, True) if _end(part) >= begun]"): "a part that ends there has no row left",
    ("hf_linattn/ops/hybrid/cpu_kernels.py", "parts = product_parts(query, exact=sinks + most + CHUNK_SIZE * (back + 1) > LEAST_KEYS)"): EXACT_PARTS,
    ("hf_linattn/ops/hybrid/sums.py", "if stop >= length:"): "no zeros are put behind",
    ("hf_linattn/ops/hybrid/torch.py", "chunks = min(most, -(-(length + first) // size))"): "what lies behind the end is cut off",
    ("hf_linattn/ops/hybrid/torch.py", "whole = causal and (not rows.padded and last + right <= rows.key.whole.shape[2])"): "one more mask, of what is masked already",
    ("hf_linattn/ops/linear/torch.py", "cut = [None if x is None else x.split(sizes, dim) if x.shape[dim] >= largest else [x] for x, dim in operands]"): "one part is the whole",
    ("hf_linattn/ops/slots/pooling.py", "if bias is None and slot_key.shape[2] <= FEW:"): "a choice of speed: a bias of zeros",
    ("hf_linattn/ops/slots/vq.py", "steps = torch.arange(2 * block_size + 1 + length, device=key.device)"): "rows end with tokens that nothing reads",
}  # fmt: skip
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.And: "and", ast.Or: "or",
}  # fmt: skip


def random_mutants(count: int, seed: int = SEED) -> list[Mutant]:
    """Return mutants with one operator swapped each, at places that the seed decides."""
    places = []
    for folder, tests in FOLDERS.items():
        path = ROOT / folder
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            if not file.name.startswith("triton"):  # its kernels have targets of their own
                name, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
                places += [(name, found, FILES.get(name, tests)) for found in _swapped(source)]
    chosen = random.Random(seed).sample(places, count)
    return [
        Mutant(f"random {number}: {file}:{line}", file, old, new, tests, new.splitlines()[line - 1].strip())
        for number, (file, (line, old, new), tests) in enumerate(chosen)
    ]


def _swapped(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, and the source before and after, with one operator swapped."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right, sign = node.left, node.comparators[0], node.ops[0]
        elif isinstance(node, ast.BinOp):
            left, right, sign = node.left, node.right, node.op
        elif isinstance(node, ast.BoolOp):
            left, right, sign = node.values[0], node.values[1], node.op
        else:
            continue
        line, end = left.end_lineno or 0, right.lineno
        if type(sign) not in SWAPS or line != end or _is_text(left) or _is_text(right):
            continue
        text = lines[line - 1].encode()
        between = text[left.end_col_offset : right.col_offset].decode()
        swapped = between.replace(SIGNS[type(sign)], SWAPS[type(sign)], 1)
        if swapped != between:
            changed = text[: left.end_col_offset] + swapped.encode() + text[right.col_offset :]
            yield line, source, "".join([*lines[: line - 1], changed.decode(), *lines[line:]])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def make_copy() -> Path:
    """Return a fresh copy of the checkout with its C built."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in (*COPIED, "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tree / name)
    build(tree)
    return tree


def try_mutant(mutant: Mutant, tree: Path, server: ForkServer) -> str:
    """Return how a mutant was killed, or "survived"."""
    file = tree / mutant.file
    source, before = file.read_text(encoding="utf-8"), file.stat()
    if mutant.old not in source:
        raise ValueError(f"mutant {mutant.name!r}: {mutant.file} has no {mutant.old[:80]!r}; write the mutant anew")
    libraries = tree / "hf_linattn" / "ops" / "runtime"
    built = {x: x.read_bytes() for x in libraries.glob("*.so")} if "csrc" in file.parts else {}
    file.write_text(source.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    changed = next(TIMES)
    os.utime(file, (changed, changed))
    try:
        if built:
            build(tree)
        for tests in mutant.tests.split(" && "):
            arguments = ["-n", "0", "-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *shlex.split(tests)]
            status, output = server.run(tree, arguments, MOST_SECONDS)
            if status is None:
                return "killed by time"
            if status == 4:
                raise ValueError(f"mutant {mutant.name!r}: pytest knows no {tests!r}: {output[-500:]}")
            if status == 5:
                return "survived: no test was selected"
            if status:
                failed = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
                return f"killed by {failed[0].split(' ', 1)[1] if failed else f'a crash ({status})'}"
    except subprocess.CalledProcessError:
        return "killed by the compiler"
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        for library, content in built.items():
            library.write_bytes(content)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run mutants whose name has this text")
    parser.add_argument("--random", type=int, default=0, help="that many random ones in place of those by hand")
    parser.add_argument("--anew", action="store_true", help="forget earlier results")
    options = parser.parse_args()
    record = WORK / "results.json"
    results = {} if options.anew or not record.exists() else json.loads(record.read_text())
    mutants = random_mutants(options.random) if options.random else MUTANTS
    left_out = set() if has_matrix_unit() else OF_THE_UNIT
    mutants = [x for x in mutants if options.only in x.name and x.name not in left_out]
    tree = make_copy()
    with ForkServer() as server:
        for mutant in mutants:
            if mutant.name in results:
                continue
            start, same = time.perf_counter(), EQUIVALENT.get((mutant.file, mutant.line))
            results[mutant.name] = f"equivalent: {same}" if same else try_mutant(mutant, tree, server)
            record.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{time.perf_counter() - start:5.0f} s  {mutant.name}: {results[mutant.name]}", flush=True)
    survivors = [x.name for x in mutants if results[x.name].startswith("survived")]
    killed = sum(results[x.name].startswith("killed") for x in mutants)
    print(f"{len(mutants)} mutants, {killed} killed; survivors: {', '.join(survivors) or 'none'}")
    if left_out and not options.random:
        print(f"left out, as this processor has no matrix unit: {', '.join(sorted(left_out))}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
