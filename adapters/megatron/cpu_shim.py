"""Stand-ins that let stock megatron-core run where there is no CUDA device.

For the CPU demo and the tests only. megatron-core asks ``torch.cuda`` for devices, streams and random states even when
every tensor could live on a CPU; :func:`install` answers with CPU equivalents. Nothing here computes: collectives go
through gloo, the maths is megatron-core's and ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os

import torch

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "empty_like", "zeros_like")
_installed = False


class CudaPresentError(RuntimeError):
    """The shim was asked for on a machine that has a CUDA device."""


class _Stream:
    """A stream whose work is already done: CPU operators are synchronous."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def query(self):
        return True

    @staticmethod
    def priority_range():
        return 0, 0


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


_STREAM = _Stream()
_CPU = torch.device("cpu")


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(function):
    """Wrap a factory so that ``device="cuda"`` means the CPU."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)

    return wrapper


def install() -> None:
    """Answer ``torch.cuda`` queries with CPU equivalents in this process. Idempotent.

    Call it before ``megatron.core`` is imported.

    Raises:
        CudaPresentError: a CUDA device is there, so nothing may be replaced.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise CudaPresentError("a CUDA device is present: the CPU shim would hide it. Run on the device instead")
    # torch.compile would need a C++ toolchain for functions that megatron-core decorates
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    importlib.import_module("torch._dynamo").config.disable = True

    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: _STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.reset_peak_memory_stats = lambda device=None: None

    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _patch_tensor_methods()
    _patch_all_to_all()
    _installed = True
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _patch_tensor_methods() -> None:
    tensor_to, tensor_type, tensor_new_empty = torch.Tensor.to, torch.Tensor.type, torch.Tensor.new_empty

    def to(self, *args, **kwargs):
        args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return tensor_to(self, *args, **kwargs)

    def type_(self, *args, **kwargs):
        # megatron-core's optimizers recognise parameters by this string
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else tensor_type(self)

    torch.Tensor.to, torch.Tensor.type = to, type_
    torch.Tensor.new_empty = _on_cpu(tensor_new_empty)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, device=None: self


def _patch_all_to_all() -> None:
    """gloo wants split sizes as a list of ints; the token dispatcher passes numpy arrays."""
    original = torch.distributed.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        output_split_sizes, input_split_sizes = (
            None if sizes is None else [int(size) for size in sizes]
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return original(output, input, output_split_sizes, input_split_sizes, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single
