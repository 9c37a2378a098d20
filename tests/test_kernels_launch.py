"""The launcher: a launch is known to work before it is made, only a device's limits reject it, the answer is kept.

Most tests give real kernels a compiler that answers as told, so that they need no GPU.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; its kernels cannot be compiled")

from triton.runtime.errors import OutOfResources

from mlff.kernels import launch as launcher
from mlff.kernels.grid_pair_triton import KERNELS, Geometry
from mlff.kernels.launch import Launch, choose, fit_offline, on_device, run

DEVICE = torch.device("cuda", 0)
SMALL_GPU = 101376  # bytes of shared memory of a block on sm_86, sm_89 and sm_120
PRO = Geometry.of(torch.float32, 2, 64, 3, (344, 108), (43, 320, 192))


def launch(columns: int) -> Launch:
    return Launch((("COLUMNS", columns), ("BLOCK", 16)), warps=4, stages=1)


class Compiler:
    """Stands in for Triton's: says what each candidate needs, fails as told, and writes down what it was asked."""

    def __init__(self, shared: dict[int, int], limit: int = SMALL_GPU) -> None:
        self.shared, self.limit = shared, limit
        self.asked: list[int] = []
        self.while_compiling: Exception | None = None

    def warmup(self, *arguments: object, grid: object, num_warps: int, num_stages: int) -> object:
        columns = next(a for a in arguments if a in self.shared)  # type: ignore[operator]
        self.asked.append(columns)  # type: ignore[arg-type]
        if self.while_compiling is not None:
            raise self.while_compiling
        need, limit = self.shared[columns], self.limit  # type: ignore[index]

        class Compiled:
            metadata = types.SimpleNamespace(shared=need)

            @property
            def run(self) -> None:  # where Triton loads a kernel and holds it against the device
                if need > limit:
                    raise OutOfResources(need, limit, "shared memory")

        return Compiled()


@pytest.fixture
def compiler(monkeypatch):
    """A kernel whose compiler is a double that knows three candidates, of which the first two are too large."""
    launcher.forget()
    double = Compiler({1032: 118784, 1016: 145408, 1008: 79872})
    kernel = KERNELS["factored"][2]
    monkeypatch.setattr(kernel, "warmup", double.warmup)
    monkeypatch.setattr(launcher, "on_device", lambda device: contextlib.nullcontext())
    double.kernel = kernel  # type: ignore[attr-defined]
    yield double
    launcher.forget()


def ask(compiler: Compiler, columns: tuple[int, ...] = (1032, 1016, 1008), geometry: Geometry = PRO) -> Launch | None:
    candidates = [launch(number) for number in columns]
    kernel = compiler.kernel  # type: ignore[attr-defined]
    return choose(kernel, geometry.arguments(2), dict(geometry.constants), candidates, DEVICE)


def test_a1_a_launch_is_resolved_before_it_is_recorded(compiler):
    """The figures of the fault: 118,784 and 145,408 bytes do not fit a limit of 101,376; 79,872 do."""
    assert ask(compiler) == launch(1008)
    assert compiler.asked == [1032, 1016, 1008]


def test_a1_recording_the_first_candidate_is_what_fails(compiler, monkeypatch):
    """The faulty design takes the first candidate because recording it raises nothing; the launch then fails."""

    def record(kernel: object) -> object:
        class Recorded:
            def __getitem__(self, grid: object) -> object:
                def call(**arguments: object) -> None:
                    need = compiler.shared[arguments["COLUMNS"]]
                    if need > compiler.limit:
                        raise OutOfResources(need, compiler.limit, "shared memory")

                return call

        return Recorded()

    monkeypatch.setattr(launcher, "wrap_triton", record)
    kernel, constants = compiler.kernel, dict(PRO.constants)
    names = [name for name in kernel.arg_names if not name.isupper()]
    values = [0] * len(names)
    with pytest.raises(OutOfResources, match="118784"):
        run(kernel, (1, 3), values, constants, launch(1032), DEVICE)
    validated = ask(compiler)
    assert validated is not None
    run(kernel, (1, 3), values, constants, validated, DEVICE)


def test_a5_a_choice_is_kept(compiler):
    first = ask(compiler)
    compiler.asked.clear()
    assert ask(compiler) == first
    assert compiler.asked == []


def test_a5_a_failed_search_is_kept(compiler):
    assert ask(compiler, (1032, 1016)) is None
    assert compiler.asked == [1032, 1016]
    assert ask(compiler, (1032, 1016)) is None
    assert compiler.asked == [1032, 1016]


def test_a5_what_the_choice_is_kept_by(compiler, monkeypatch):
    """Kernel, device, static geometry, dtypes of all operands, order: each of them asks anew."""
    ask(compiler)
    kernel = compiler.kernel  # type: ignore[attr-defined]
    candidates = [launch(1008)]
    calls = []
    for constants, arguments, device in (
        (dict(PRO.constants) | {"C": 32}, PRO.arguments(2), DEVICE),
        (dict(PRO.constants), [torch.bfloat16, *PRO.arguments(2)[1:]], DEVICE),
        (dict(PRO.constants), PRO.arguments(2), torch.device("cuda", 1)),
    ):
        compiler.asked.clear()
        choose(kernel, arguments, constants, candidates, device)
        calls.append(compiler.asked.copy())
    other = KERNELS["factored"][1]
    monkeypatch.setattr(other, "warmup", compiler.warmup)
    compiler.asked.clear()
    choose(other, PRO.arguments(1), dict(PRO.constants), candidates, DEVICE)
    assert [*calls, compiler.asked] == [[1008]] * 4


def test_a6_best_first_and_duplicates_once(compiler):
    assert ask(compiler, (1032, 1032, 1016, 1032, 1008)) == launch(1008)
    assert compiler.asked == [1032, 1016, 1008]


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), ValueError("bad IR"), KeyError("sm_999")])
def test_a7_any_other_error_surfaces_with_the_kernel_s_name_and_is_not_kept(compiler, error):
    compiler.while_compiling = error
    with pytest.raises(type(error)) as caught:
        ask(compiler)
    assert any("factored_double_backward" in note and "columns=1032" in note for note in caught.value.__notes__)
    compiler.while_compiling = None
    assert ask(compiler) == launch(1008)


def test_a7_a_limit_met_while_compiling_rejects_too(compiler, monkeypatch):
    """Some limits are met by the compiler itself, before there is a kernel to load."""
    compiler.while_compiling = OutOfResources(2048, 1024, "threads")
    assert ask(compiler) is None


def test_the_reference_takes_over_with_one_line(caplog):
    launcher.forget()
    kernel = KERNELS["dense"][0]
    for _ in range(3):
        launcher.warn_reference(kernel, {"K": 3, "C": 7}, torch.float32, DEVICE)
    assert [record.getMessage() for record in caplog.records] == [
        "No launch of dense_forward fits cuda:0 in float32 (K=3, C=7): plain PyTorch takes over, slower, with the same "
        "values."
    ]


# Real kernels, compiled for devices that are not here.


def test_a1_offline_a_small_gpu_gets_a_smaller_tile():
    """Degree 6, two streams, float32, second backward by dense projectors: the first choice is for large GPUs."""
    geometry = Geometry.of(torch.float32, 2, 96, 3, (584, 147), None)
    kernel, arguments, constants = geometry.kernel(2), geometry.arguments(2), dict(geometry.constants)
    large, small = geometry.fit_offline(2, 90), geometry.fit_offline(2, 120)
    assert large is not None and small is not None
    assert large.launch == geometry.candidates()[0]
    assert large.shared > SMALL_GPU >= small.shared
    assert fit_offline(kernel, arguments, constants, geometry.candidates()[:1], 120) is None


@pytest.mark.parametrize("limit", [101376, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rk8_the_largest_presets_fit_small_devices(limit, dtype):
    for factors in ((73, 320, 192), None):
        geometry = Geometry.of(dtype, 2, 96, 3, (584, 147), factors)
        fit = geometry.fit_offline(2, 120, limit)
        # Dense projectors of this size are used by no preset, and where nothing fits, plain PyTorch runs.
        assert fit is not None or factors is None
        assert fit is None or fit.shared <= limit


def test_offline_limits_must_be_known():
    with pytest.raises(ValueError, match=r"sm_70 are not known here; known are sm_80, sm_86"):
        fit_offline(PRO.kernel(0), PRO.arguments(0), dict(PRO.constants), PRO.candidates(), 70)


@pytest.mark.parametrize("form", ["dense", "factored"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a3_a4_nothing_known_only_at_run_time_specialises_a_kernel(form, order):
    """Numbers are 64-bit and not specialised; alignment counts for the constant tables alone."""
    kernel = KERNELS[form][order]
    tables = {"dense": {"to_grid", "from_grid"}, "factored": {"matrix", "slots", "scale"}}[form]
    for parameter in kernel.params:
        if parameter.is_constexpr:
            assert parameter.name.isupper()
        elif parameter.annotation_type:
            assert parameter.annotation_type == "i64" and parameter.do_not_specialize
        else:
            assert parameter.do_not_specialize_on_alignment == (parameter.name not in tables)


def test_rk12_a_cache_folder_that_cannot_be_written():
    program = (
        "import torch, triton\n"
        "from mlff.kernels.grid_pair_triton import Geometry\n"
        "from mlff.kernels.launch import fit_offline\n"
        "g = Geometry.of(torch.float32, 1, 4, 3, (24, 12), (3, 96, 64))\n"
        "fit = fit_offline(g.kernel(0), g.arguments(0), dict(g.constants), g.candidates(), 80)\n"
        "print(fit.shared, triton.knobs.cache.dir)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HOME": "/proc/nowhere", "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout.split()[0]) > 0
    assert "/proc/nowhere" not in done.stdout
    assert "cannot be written to; compiled kernels go to" in done.stderr


# The device guard.


class Devices:
    """Stands in for torch.cuda: knows which device is current, and writes down what happens."""

    def __init__(self) -> None:
        self.current = 0
        self.seen: list[int] = []

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, index: int):
        before, self.current = self.current, index
        self.seen.append(index)
        try:
            yield
        finally:
            self.current = before


@pytest.mark.parametrize("index", [0, 1])
def test_b1_the_input_s_device_is_current_during_a_launch_and_the_caller_s_afterwards(monkeypatch, index):
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    during = []

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            return lambda **arguments: during.append(devices.current)

    monkeypatch.setattr(launcher, "wrap_triton", lambda kernel: Kernel())
    kernel = KERNELS["dense"][0]
    values = [0] * sum(not name.isupper() for name in kernel.arg_names)
    run(kernel, (1,), values, {}, launch(16), torch.device("cuda", index))
    assert during == [index]
    assert devices.current == 0
    run(kernel, (0, 1), values, {}, launch(16), torch.device("cuda", index))
    assert during == [index], "nothing is launched for an empty grid"


def test_b1_the_caller_s_device_comes_back_after_an_error(monkeypatch):
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    with pytest.raises(RuntimeError, match="launch failed"), on_device(torch.device("cuda", 1)):
        assert devices.current == 1
        raise RuntimeError("launch failed")
    assert devices.current == 0


def test_b7_torch_has_what_the_guard_needs():
    """torch.get_device_module came with torch 2.4; the package asks for 2.11."""
    assert torch.get_device_module("cpu") is torch.cpu
