"""The one launcher of all Triton kernels: it knows that a launch will work before the launch is made or recorded.

Shared memory, registers and threads are limits of a device that a tile may exceed. While a graph is traced, a launch is
only written down, and a tile that does not fit fails much later, inside the compiler, where nobody can choose a smaller
one. So a launch is chosen first:

    launch = choose(kernel, arguments, constants, candidates, device)      # None: no candidate fits
    run(kernel, grid, tensors_and_numbers, constants, launch, device)

`choose` compiles each candidate exactly as it will run (the same dtypes, the same constants) and loads it, without
allocating or running anything; `fit_offline` answers the same for an architecture that is not there. Only a limit of
the device rejects a candidate. Every other error of the compiler surfaces.

What is checked is what runs, because numbers known only at run time (sizes, strides) and the alignment of data do not
specialise the kernel: see `specialise`. Constants, and only they, are written in capitals.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton import knobs
from triton.runtime.errors import OutOfResources

logger = logging.getLogger("mlff.kernels")

Argument = torch.dtype | type[int]
"""What is known of an argument before there is data: a tensor's dtype, or that it is a number."""

SHARED_MEMORY: Mapping[int, int] = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}
"""Largest dynamic shared memory of a block in bytes by compute capability (CUDA C++ programming guide, "Technical
Specifications per Compute Capability": the maximum per block, which is 1 kB less than per multiprocessor)."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut into programs.

    Attributes:
        blocks: values of the kernel's block arguments, by name.
        warps: of a program.
        stages: of software pipelining.
    """

    blocks: tuple[tuple[str, int | str], ...]
    warps: int = 4
    stages: int = 1

    def __str__(self) -> str:
        blocks = " ".join(f"{name.lower()}={value}" for name, value in self.blocks)
        return f"{blocks} warps={self.warps} stages={self.stages}"

    def arguments(self) -> dict[str, Any]:
        """Return what Triton takes at the launch."""
        return {**dict(self.blocks), "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Fit:
    """The launch that was chosen, and the shared memory in bytes that it takes."""

    launch: Launch
    shared: int


Key = tuple[Any, ...]
_choices: dict[Key, Fit | None] = {}
_lock = threading.RLock()


def specialise(aligned: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator of Triton kernels whose arguments are pointers, numbers annotated int64, and constants.

    Values, strides and alignments stay out of the compiled code, so that one compilation serves every call.

    Args:
        aligned: pointers that always start at a multiple of 16 bytes, as whole tensors do; loads from them are wide.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        parameters = inspect.signature(kernel).parameters
        numbers = [name for name, p in parameters.items() if "int64" in str(p.annotation)]
        pointers = [name for name in parameters if not name.isupper() and name not in (*numbers, *aligned)]
        jit: Any = triton.jit  # its stub does not know functions that are not annotated
        return jit(kernel, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)

    return decorate


def choose(
    kernel: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    candidates: Iterable[Launch],
    device: torch.device,
) -> Launch | None:
    """Return the first candidate that the device accepts, or None.

    The answer, None too, is kept by kernel, device, arguments, constants and candidates. What is only known at run
    time, sizes and strides, is no part of that.

    Args:
        kernel: decorated with `specialise`.
        arguments: of its pointers and numbers, in order, without those among the constants.
        constants: values of its constants apart from the blocks: the static geometry.
        candidates: best first; duplicates are tried once.
        device: where the kernel will run.

    Raises:
        Exception: whatever the compiler raises other than a limit of the device; it names the kernel.
    """
    if _interpreted(kernel):  # on a CPU every tile fits
        return next(iter(candidates), None)
    fit = _fit(("device", device.type, device.index), kernel, arguments, constants, candidates, _on_device(device))
    return None if fit is None else fit.launch


def fit_offline(
    kernel: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    candidates: Iterable[Launch],
    capability: int,
    limit: int | None = None,
) -> Fit | None:
    """Return what `choose` would on a CUDA device of a compute capability (90 = 9.0), which need not be there.

    The compiler is the same; the limit of shared memory in bytes comes from `SHARED_MEMORY` unless given.

    Raises:
        ValueError: the capability is not in that table.
    """
    if capability not in SHARED_MEMORY:
        known = ", ".join(f"sm_{number}" for number in SHARED_MEMORY)
        raise ValueError(f"the limits of sm_{capability} are not known here; known are {known}.")
    limit = SHARED_MEMORY[capability] if limit is None else limit
    compile_ = _for_capability(capability, limit)
    return _fit(("capability", capability, limit), kernel, arguments, constants, candidates, compile_)


def run(
    kernel: Any,
    programs: tuple[int, ...],
    values: Sequence[Tensor | int],
    constants: Mapping[str, Any],
    launch: Launch,
    device: torch.device,
) -> None:
    """Launch a kernel on a grid of programs, on a device's current stream; the caller's device stays current.

    While a graph is traced, the launch is recorded instead. No program, no launch.
    """
    if any(isinstance(size, int) and size == 0 for size in programs):
        return
    names = _runtime_names(kernel, constants)
    arguments = {**dict(zip(names, values, strict=True)), **constants, **launch.arguments()}
    if _interpreted(kernel):
        kernel[programs](**arguments)
        return
    with on_device(device):
        wrap_triton(kernel)[programs](**arguments)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a device current, as a launch needs it, and the caller's again afterwards, also after an error."""
    module = torch.get_device_module(device)
    if device.index is None or device.index == module.current_device():
        yield
        return
    with module.device(device.index):
        yield


def warn_reference(kernel: Any, constants: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Say once that no launch of a kernel fits a device, so that plain PyTorch takes over."""
    key = ("warned", _name(kernel), tuple(constants.items()), dtype, str(device))
    with _lock:
        if key in _choices:
            return
        _choices[key] = None
    logger.warning(
        "No launch of %s fits %s in %s (%s): plain PyTorch takes over, slower, with the same values.",
        _name(kernel),
        device,
        str(dtype).removeprefix("torch."),
        ", ".join(f"{name}={value}" for name, value in constants.items()),
    )


def forget() -> None:
    """Forget all choices, as a new process would."""
    with _lock:
        _choices.clear()


# How a candidate is compiled: kernel, arguments, constants, launch -> shared memory in bytes.
_Compile = Callable[[Any, Sequence[Argument], Mapping[str, Any], Launch], int]


def _fit(
    place: Key,
    kernel: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    candidates: Iterable[Launch],
    compile_: _Compile,
) -> Fit | None:
    tried = tuple(dict.fromkeys(candidates))
    key = (*place, _name(kernel), tuple(arguments), tuple(constants.items()), tried)
    if key in _choices:
        return _choices[key]
    with _lock:
        if key not in _choices:
            _choices[key] = _first(kernel, arguments, constants, tried, compile_)
        return _choices[key]


def _first(
    kernel: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    candidates: Iterable[Launch],
    compile_: _Compile,
) -> Fit | None:
    _find_cache_folder()
    for launch in candidates:
        try:
            return Fit(launch, compile_(kernel, arguments, constants, launch))
        except OutOfResources as error:
            logger.debug("%s, %s: %s", _name(kernel), launch, error)
        except Exception as error:
            error.add_note(f"while compiling the kernel {_name(kernel)} with {launch}")
            raise
    return None


@functools.cache
def _find_cache_folder() -> None:
    """Let Triton keep compiled kernels in a temporary folder where its own cannot be written to."""
    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        knobs.cache.dir = tempfile.mkdtemp(prefix="triton-")
        logger.warning("%s cannot be written to; compiled kernels go to %s.", folder, knobs.cache.dir)


def _on_device(device: torch.device) -> _Compile:
    def compile_(kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], launch: Launch) -> int:
        placeholders = [2 if argument is int else argument for argument in arguments]
        with on_device(device):
            names = _runtime_names(kernel, constants)
            values = dict(zip(names, placeholders, strict=True))
            # `warmup` maps dtypes to placeholders only among positional arguments, hence the whole list in order.
            given = {**values, **constants, **dict(launch.blocks)}
            ordered = [given[name] for name in kernel.arg_names]
            compiled = kernel.warmup(*ordered, grid=(1,), num_warps=launch.warps, num_stages=launch.stages)
            _ = compiled.run  # loads the kernel, which is where a device's limits are checked
        return compiled.metadata.shared

    return compile_


def _for_capability(capability: int, limit: int) -> _Compile:
    def compile_(kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], launch: Launch) -> int:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = dict(zip(_runtime_names(kernel, constants), map(_type_name, arguments), strict=True))
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(kernel.params) if _aligned(p, types)}
        source = ASTSource(kernel, signature, constexprs={**constants, **dict(launch.blocks)}, attrs=aligned)
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        shared = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared
        if shared > limit:
            raise OutOfResources(shared, limit, "shared memory")
        return shared

    return compile_


def _aligned(parameter: Any, types: Mapping[str, str]) -> bool:
    """Whether a parameter is a pointer of which the compiler knows the alignment."""
    return types.get(parameter.name, "").startswith("*") and not parameter.do_not_specialize_on_alignment


def _type_name(argument: Argument) -> str:
    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    return {**names, torch.int32: "*i32", torch.int64: "*i64", int: "i64"}[argument]


def _runtime_names(kernel: Any, constants: Mapping[str, Any]) -> list[str]:
    """Names of pointers and numbers. Constants are written in capitals; a number may be one of them all the same."""
    return [name for name in kernel.arg_names if not name.isupper() and name not in constants]


def _interpreted(kernel: Any) -> bool:
    return not isinstance(kernel, triton.runtime.JITFunction)


def _name(kernel: Any) -> str:
    return kernel.fn.__name__
