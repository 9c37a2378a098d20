"""The whole model against numbers from deepmd-kit 3.2.0, option by option."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mlff.derivatives import evaluate
from mlff.elements import atomic_number
from mlff.graph import Graph
from mlff.interop.deepmd import from_state
from mlff.neighbors import neighbor_list
from mlff.sezm.potential import SeZM

HERE = Path(__file__).parent / "oracle"
ALL = Path(os.environ.get("MLFF_ORACLE", Path(__file__).parents[2] / "shared" / "oracle"))

# The 47 cases; ten of them live beside this file.
CASES = (
    "attnres_block_dep attnres_full_dep attnres_full_indep bias_scale chgspin default_l3 edge_cartesian_l2 exclude "
    "extra_node_l fit_hidden focus2 focus2_noedgenorm focus3_fmix gaussian lmax6_k3 lmax6_k3_m3 mini mini_noedge mix0 "
    "mmax2_l3 mmax3_l3 native_spin noatten noatten_focus2 node_cartesian node_wise_s2 node_wise_so3 noenvseed "
    "pro401_like pro_like pyramid radial_degree radial_none radial_rank0 radial_rank2 s2_both_lebedev "
    "s2_both_product s2_none s2_none_noglu "
    "sandwich_pre so3grid_k1_glu so3grid_k2_branch so3grid_k2_mlp tanh_act zbl zbl_wide zeroblock"
).split()

# Two float64 implementations of one formula differ by round-off, 1e-11 or less here.
TOLERANCE = 1e-9
# The reference builds its latitude-longitude projectors in float32, which moves them by 7e-7; ours are exact.
# `test_product_grid_with_float32_projectors` shows that this is the whole difference.
PRODUCT_GRID = 5e-7
PRODUCT_GRID_CASES = ("pro_like", "s2_both_product")


def reference(case: str) -> np.lib.npyio.NpzFile:
    path = ALL / f"{case}.npz" if (ALL / f"{case}.npz").exists() else HERE / f"{case}.npz"
    if not path.exists():
        pytest.skip(f"{case}.npz is not beside the tests; set MLFF_ORACLE to the folder of all reference cases")
    return np.load(path)


def model(file: np.lib.npyio.NpzFile, dtype: torch.dtype = torch.float64) -> SeZM:
    config = json.loads(str(file["config_normalized_json"]))
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    return from_state(config, state, dtype=dtype).eval()


def structures(file: np.lib.npyio.NpzFile) -> list[str]:
    return [name.split("::")[0] for name in file.files if name.endswith("::coord")]


def graph(file: np.lib.npyio.NpzFile, name: str, cutoff: float, charge: float = 0.0, spin: float = 0.0) -> Graph:
    type_map = json.loads(str(file["config_normalized_json"]))["type_map"]
    positions = file[f"{name}::coord"].reshape(-1, 3)
    periodic = file[f"{name}::cell"].size > 0
    cell = file[f"{name}::cell"].reshape(3, 3) if periodic else np.zeros((3, 3))
    pbc = np.array([periodic] * 3)
    senders, receivers, shifts = neighbor_list(positions, cell, pbc, cutoff)
    spins = torch.tensor(file[f"{name}::spin"]) if f"{name}::spin" in file.files else None
    return Graph(
        positions=torch.tensor(positions),
        numbers=torch.tensor([atomic_number(type_map[kind]) for kind in file[f"{name}::type"]]),
        structure=torch.zeros(len(positions), dtype=torch.int64),
        senders=torch.tensor(senders),
        receivers=torch.tensor(receivers),
        shifts=torch.tensor(shifts),
        cell=torch.tensor(cell)[None],
        pbc=torch.tensor(pbc)[None],
        charge=torch.tensor([charge], dtype=torch.float64),
        spin=torch.tensor([spin], dtype=torch.float64),
        spins=spins,
    )


def close(found: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    """|found - expected| <= tolerance · max(1, |expected|), element by element."""
    wanted = torch.tensor(expected).reshape(found.shape)
    excess = (found - wanted).abs() / wanted.abs().clamp_min(1)
    assert float(excess.max()) <= tolerance


@pytest.mark.parametrize("case", CASES)
def test_energies_forces_and_virial_of_every_structure(case: str) -> None:
    file = reference(case)
    potential = model(file)
    tolerance = PRODUCT_GRID if case in PRODUCT_GRID_CASES else TOLERANCE
    assert structures(file)
    for name in structures(file):
        found = evaluate(potential, graph(file, name, potential.cutoff))
        close(found.energy, file[f"{name}::energy"], tolerance)
        close(found.energies, file[f"{name}::atom_energy"], tolerance)
        close(found.forces, file[f"{name}::force"], tolerance)
        close(found.virial, file[f"{name}::virial"], tolerance)
        if f"{name}::force_mag" in file.files:
            assert found.magnetic_forces is not None
            close(found.magnetic_forces, file[f"{name}::force_mag"], tolerance)


@pytest.mark.parametrize("case", CASES)
def test_float32_forces(case: str) -> None:
    """In single precision the same model is right to 1e-4 eV/Å, where forces are of order 1 eV/Å."""
    file = reference(case)
    potential = model(file, torch.float32)
    for name in structures(file):
        found = evaluate(potential, graph(file, name, potential.cutoff))
        expected = torch.tensor(file[f"{name}::force"]).reshape(found.forces.shape)
        scale = expected.abs().max().clamp_min(1)  # ZBL forces reach 10^4 eV/Å, where 1e-4 is below float32's own step
        assert float((found.forces - expected).abs().max() / scale) < 1e-4


def test_charge_and_spin_of_the_caller() -> None:
    file = reference("chgspin")
    potential = model(file)
    for name in structures(file):
        found = evaluate(potential, graph(file, name, potential.cutoff, charge=1, spin=2))
        close(found.energy, file[f"{name}::q1s2_energy"], TOLERANCE)
        close(found.forces, file[f"{name}::q1s2_force"], TOLERANCE)


@pytest.mark.parametrize("case", PRODUCT_GRID_CASES)
def test_product_grid_with_float32_projectors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With e3nn's own float32 matrices in place of ours, the difference is that of two float64 programs (or ten times
    float32's eps, where the reference also scales them in float32): the looser tolerance above hides nothing else.
    """
    o3 = pytest.importorskip("e3nn.o3", reason="compares with e3nn, which is not a dependency")
    from mlff.sezm import feedforward, grid, so2

    exact = grid.sphere_grid

    def rounded(degree: int, order: int | None = None, lebedev: bool = True, isotropic: bool = True) -> grid.Grid:
        made = exact(degree, order, lebedev, isotropic)
        if lebedev:
            return made
        latitudes = 2 * ((3 * degree + 3) // 2)
        longitudes = 2 * (degree if order is None else order) + 4
        if isotropic:
            latitudes = longitudes = max(latitudes, longitudes)
        shape = (latitudes, longitudes)
        to = o3.ToS2Grid(degree, shape, normalization="component", dtype=torch.float32)
        back = o3.FromS2Grid(shape, degree, normalization="component", dtype=torch.float32)
        to_grid = torch.einsum("mbi,am->bai", to.shb, to.sha).flatten(0, 1)
        from_grid = torch.einsum("am,mbi->bai", back.sha, back.shb).flatten(0, 1)
        index, degrees = grid._rows(degree, order)
        scale = torch.ones(len(degrees))
        if order is not None and order < degree:
            scale = torch.where(degrees > order, ((2 * degrees + 1) / (2 * order + 1)).sqrt(), scale)
        to_grid, from_grid = (matrix[:, index] * scale for matrix in (to_grid, from_grid))
        return grid.Grid(to_grid.double(), from_grid.double(), degree, 1, degrees)

    for module in (feedforward, so2):
        monkeypatch.setattr(module, "sphere_grid", rounded)
    file = reference(case)
    potential = model(file)
    tolerance = TOLERANCE if case == "pro_like" else 1e-7
    for name in structures(file):
        found = evaluate(potential, graph(file, name, potential.cutoff))
        close(found.energy, file[f"{name}::energy"], tolerance)
        close(found.forces, file[f"{name}::force"], tolerance)
        close(found.virial, file[f"{name}::virial"], tolerance)


def test_public_water_checkpoint() -> None:
    """A real checkpoint of the family, float32, on 64 water molecules."""
    file = reference("pretrained_water")
    config = json.loads(str(file["config_json"]))
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    names = {"coord": "water::coord", "type": "water::type", "cell": "water::cell"}
    inputs = _Renamed(config, {new: file[old] for old, new in names.items()})
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        potential = from_state(config, state, dtype=dtype).eval()
        found = evaluate(potential, graph(inputs, "water", potential.cutoff))  # type: ignore[arg-type]
        expected = file[f"{str(dtype).removeprefix('torch.')}::energy"].item()
        # 1e-6 eV in float32: atoms of 0.1 eV each beside reference energies that are added in float64.
        assert abs(float(found.energy) - expected) < tolerance * max(1.0, abs(expected) * (dtype == torch.float64))


class _Renamed(dict):
    """The inputs of a file under the names that `graph` reads."""

    def __init__(self, config: dict, arrays: dict) -> None:
        super().__init__(arrays, config_normalized_json=json.dumps(config))
        self.files = list(self)


def test_options_that_are_not_represented_are_refused() -> None:
    file = reference("mini")
    config = json.loads(str(file["config_normalized_json"]))
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    for change, words in (
        ({"env_exp": 5}, "env_exp as one number"),
        ({"edge_norm": [True, False, True]}, "edge_norm as a list"),
        ({"basis_type": "gaussian/fix"}, "basis_type"),
    ):
        altered = {**config, "descriptor": {**config["descriptor"], **change}}
        with pytest.raises(ValueError, match=words):
            from_state(altered, state)


def test_every_tensor_is_used_once() -> None:
    """A missing, a strange and a misshapen tensor are errors that name it."""
    file = reference("mini")
    config = json.loads(str(file["config_normalized_json"]))
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    key = "atomic_model.descriptor.radial_basis.adam_freqs"
    with pytest.raises(ValueError, match="no tensor 'descriptor.radial_basis.adam_freqs'"):
        from_state(config, {name: value for name, value in state.items() if name != key})
    with pytest.raises(ValueError, match="does not know: descriptor.novelty.weight"):
        from_state(config, {**state, "atomic_model.descriptor.novelty.weight": np.zeros(3)})
    with pytest.raises(ValueError, match="has shape"):
        from_state(config, {**state, key: np.zeros((1, 9))})


def test_elements_in_another_order() -> None:
    """The element list of the caller may differ from the file's; energies do not."""
    file = reference("mini")
    config = json.loads(str(file["config_normalized_json"]))
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    potential = from_state(config, state, elements=["H", "O", "C"]).eval()
    found = evaluate(potential, graph(file, "methanol", potential.cutoff))
    close(found.energy, file["methanol::energy"], TOLERANCE)
    with pytest.raises(ValueError, match="Au was asked for"):
        from_state(config, state, elements=["Au"])
