"""Backends: which policy the mechanisms of a model have. What comes out is the same but for rounding.

A policy is an order of backends, see `ops.dispatch`, where the choice is made for every call. `auto` takes all tokens
in one call, by the C of `csrc` where that can do it, on some GPUs by Triton; `torch` takes PyTorch's operations alone,
`triton` Triton wherever there are kernels, `compile` programs that torch.compile makes of slabs of tokens. A model
that torch.compile compiles as a whole takes PyTorch's operations.
"""

from __future__ import annotations

from .config import require_known
from .errors import OptionError
from .mechanisms import Mechanism
from .mechanisms.composite import CompositeMechanism
from .mechanisms.softmax import SoftmaxMechanism
from .ops.dispatch import POLICIES
from .patching import ModelT, get_mechanisms


def set_backend(model: ModelT, backend: str) -> ModelT:
    """Choose how the mechanisms of a patched model work through long causal inputs, and return it; it is not saved.

    `"auto"`, the default, takes the fastest way that was installed: on a CPU the C of `csrc` for what it knows, if it
    was built (`hf-linattn env` says so), else PyTorch's operations. The C knows `linear` with its feature maps, packed
    rows included, `hybrid`, causal `linformer`, `lsh` and the block-sparse mechanisms, forward and back, and without
    gradients patterns with parameters, too. All but `lsh` read half precision as it is. Products of bfloat16 are made
    by the matrix unit (AMX) if there is one, and those of float32 where that is faster: rounded after
    `torch.set_float32_matmul_precision("medium")`, else with all digits in three parts. On a Hopper GPU it is
    `"triton"`, if that is installed with a `ptxas` it can trust. `"torch"` takes PyTorch's operations alone.

    `"compile"` compiles (with the C++ compiler that `torch.compile` needs, half a minute at first) what `linear`, its
    feature maps and `hybrid` do with 1,024 tokens, for inputs of 2,048 and more: for devices and machines without the
    C. Every batch size has a program of its own, of which torch.compile makes eight. Padded or packed rows, shorter
    inputs, decoding and bidirectional layers take the same way as with `"auto"`, and so do layers that keep softmax.

    `"triton"` is for GPUs that PyTorch calls `"cuda"`, of NVIDIA and AMD; on others it is `"torch"`. `linear` with all
    its feature maps, and what is built on it, has its sums over keys made by Triton, forward and back, causal and both
    ways; features too, where the map is an activation of one product, and a step of decoding, as of `hybrid` over
    these maps. The block-sparse mechanisms, causal `linformer` and the window of `hybrid` have their softmax made by
    it, forward and back, unless the pattern itself needs gradients; nothing is copied together first. Half precision
    is read as it is. In PyTorch's default `float32_matmul_precision` a product of float32 is made of three of TF32.
    What else continues a state, and bidirectional layers of `linformer`, take PyTorch's operations. On Hopper the
    kernels use products of warp groups if the `ptxas` that Triton calls is that of CUDA 13.3 or later, as older ones
    get them wrong (`ops.runtime.triton.is_large`): Triton 3.9 brings one, and for older ones `pip install
    nvidia-cuda-nvcc` does, for the variable `TRITON_PTXAS_PATH` to name. `TRITON_INTERPRET=1` is for tests on a CPU.

    What `torch.compile` or `torch.export` records is made of PyTorch's operations; with `"triton"` a warning says so.
    The environment variable `HF_LINATTN_BACKEND=torch`, read when the library is imported, makes that the default: to
    see whether an error comes from the C. `explain_backend(model, inputs)` shows what each layer takes, and why.

    Args:
        model: a patched model.
        backend: `"auto"`, `"torch"`, `"compile"` or `"triton"`.

    Raises:
        UnknownNameError: there is no such backend.
        OptionError: a mechanism of the model does not know it, or Triton is not installed.
        PatchError: the model is not patched.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model, set_backend
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> model = set_backend(model, "compile")
    """
    require_known("backend", backend, POLICIES)
    mechanisms = [x for x in get_mechanisms(model).values() if not isinstance(x, SoftmaxMechanism)]
    for mechanism in mechanisms:
        if backend not in mechanism.backends:
            raise OptionError(
                f"mechanism {mechanism.config.mechanism!r} of layer {mechanism.layer.index} has no backend"
                f" {backend!r}; use one of {', '.join(mechanism.backends)}"
            )
    if backend == "triton":
        require_triton()  # what is missing is missed before anything changes
    for mechanism in mechanisms:
        use_backend(mechanism, backend)
    return model


def use_backend(mechanism: Mechanism, backend: str) -> None:
    """Give a mechanism that knows it one of `POLICIES`."""
    mechanism.backend = backend
    for member in mechanism.parts() if isinstance(mechanism, CompositeMechanism) else ():
        member.backend = backend


def require_triton() -> None:
    """Raise `OptionError` where Triton is not installed."""
    try:
        from .ops.runtime.triton import kinds  # noqa: F401 - here: nothing else needs Triton
    except ImportError as error:
        raise OptionError(f"backend 'triton' needs Triton ({error}): pip install triton") from error
