"""Make a data set: the small embedded one or a large one of molecules, labelled by GFN2-xTB, or one of crystals.

    python scripts/make_dataset.py what=embedded output=presets/data
    python scripts/make_dataset.py what=pretraining frames=100000 workers=16 seed=1 output=pretraining
    python scripts/make_dataset.py what=crystals frames=40000 workers=16 seed=1 output=crystals

Needs `pip install "mlff[dataset]"`; crystals, which SevenNet-0 labels, `pip install "mlff[crystals]"`.
`python scripts/make_dataset.py --help` lists the keys.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import hashlib
import itertools
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from mlff.data import crystals, generate, molecules, teacher
from mlff.data.generate import Frames
from mlff.data.packed import PackedGroup, write_packed
from mlff.data.parallel import outcomes


@dataclass(frozen=True)
class Options:
    """The keys of the command line with their defaults."""

    what: str = "pretraining"  # embedded | pretraining | crystals
    output: str = ""  # folder for the files; made if it is not there
    seed: int = 1
    frames: int = 100_000  # pretraining: stop at about so many
    workers: int = 1  # pretraining: processes, one core each
    max_seconds: float = 0.0  # pretraining: stop after so long with what there is; 0 = no limit
    task_seconds: float = 60.0  # pretraining: give up a molecule after so long
    frames_per_molecule: int = 12
    shard_frames: int = 30_000  # pretraining: training frames in one file, at most 15 MiB
    max_atoms: int = 30  # pretraining: heaviest molecule; crystals: largest supercell
    elements: str = ",".join(molecules.ELEMENTS)  # of molecules; may also have Br, I, Si, B


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the data set that the arguments ask for; 0 when it was made."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in arguments):
        print(__doc__)
        for key in dataclasses.fields(Options):
            print(f"  {key.name}={key.default}")
        return 0
    try:
        options = read_options(arguments)
        if options.what == "crystals":
            teacher.check()
        else:
            molecules.require("rdkit.Chem")
            molecules.require("tblite")
    except (ValueError, ModuleNotFoundError) as error:
        print(f"make_dataset: {error}", file=sys.stderr)
        return 2
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # read when tblite is loaded, and by the processes: each works on one core
    {"embedded": make_embedded, "pretraining": make_pretraining, "crystals": make_crystals}[options.what](options)
    return 0


def read_options(arguments: Sequence[str]) -> Options:
    """Return the options from `key=value` words.

    Raises:
        ValueError: a word that is no `key=value`, a key or an element that is not known, or a value of the wrong type.
    """
    fields = {key.name: type(key.default) for key in dataclasses.fields(Options)}
    values: dict[str, Any] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {word!r}; for example what=embedded")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no key {key!r}; did you mean {near!r}? --help lists all")
        try:
            values[key] = fields[key](text)
        except ValueError as error:
            raise ValueError(f"{key} must be {fields[key].__name__}, got {text!r}") from error
    options = Options(**values)
    if options.what not in ("embedded", "pretraining", "crystals"):
        raise ValueError(f"what must be embedded, pretraining or crystals, got {options.what!r}")
    if not options.output:
        raise ValueError("output is missing: name the folder to write to, for example output=pretraining")
    known = molecules.ELEMENTS + molecules.MORE_ELEMENTS
    if strange := [symbol for symbol in options.elements.split(",") if symbol not in known]:
        raise ValueError(f"elements may have {', '.join(known)}; got {', '.join(strange)}")
    for key in ("frames", "workers", "frames_per_molecule", "shard_frames", "max_atoms"):
        if getattr(options, key) < 1:
            raise ValueError(f"{key} must be at least 1, got {getattr(options, key)}")
    return options


@dataclass(frozen=True)
class Family:
    """What a large data set is made of."""

    tasks: Iterator[Any]
    frames_of: Callable[[Any], Frames]
    provenance: dict[str, Any]
    title: str
    groups: str  # what the names of groups and the kinds of frames mean


def make_pretraining(options: Options) -> None:
    """Write molecules and their complexes with GFN2-xTB labels, and the free atoms as atoms.h5."""
    elements = options.elements.split(",")
    family = Family(
        generate.tasks(options.seed, elements, options.max_atoms, options.frames_per_molecule),
        generate.frames_of,
        provenance(options),
        "varied molecules and their complexes",
        "molecules: one molecule; dimers: two; clusters: three to six; pairs: two atoms. Each HDF5 group is "
        "one task; its frames attribute tells how each frame was made: relaxed (near the GFN2-xTB minimum), "
        "relaxation (on the way there), modes (harmonic displacements at 300-1500 K), force-field (MMFF94 or "
        "UFF Langevin dynamics, 300-1500 K), dynamics (GFN2-xTB Langevin dynamics), stretch (one bond at "
        "0.75-1.6 of its length), turn (one group turned), approach (molecules at 0.5-1.7 of van der Waals "
        "contact), pair (atoms at 0.55 of a bond's length to 7 Å).",
    )
    make_large(options, family)
    write_atoms(Path(options.output) / "atoms.h5", elements, options)


def make_crystals(options: Options) -> None:
    """Write crystals of many elements with energies, forces and stresses of SevenNet-0."""
    sources = (Path(__file__), Path(str(crystals.__file__)), Path(str(teacher.__file__)))
    family = Family(
        crystals.tasks(options.seed, options.frames_per_molecule, options.max_atoms),
        crystals.frames_of,
        common_provenance(options, sources)
        | {
            "method": teacher.METHOD,
            "units": "Å, eV, eV/Å, eV/Å³ (stress as in ASE); total energies; periodic along all axes",
            "sevenn": metadata.version("sevenn"),
            "licence": "CC0-1.0: made by this project, with SevenNet-0 (MIT), and put in the public domain",
        },
        "inorganic crystals, strained, shaken and with defects",
        "elements: one element; compounds: ionic prototypes with balanced charges; alloys: metals on the sites of a "
        "prototype. Each HDF5 group is one supercell; its frames attribute tells how each frame was made: relaxed "
        "(the prototype at its best volume), strained, shaken, descent (from a shaken one along its forces).",
    )
    make_large(options, family)


def make_large(options: Options, family: Family) -> None:
    """Write train-00.h5, train-01.h5, …, valid.h5, test.h5 and summary.json; say how far it is."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = family.tasks
    shards = Shards(folder, options, family)
    began = time.monotonic()

    def late() -> bool:
        return bool(options.max_seconds) and time.monotonic() - began > options.max_seconds

    waiting: dict[int, Frames | None] = {}  # done, but an earlier task is not
    failures: Counter[str] = Counter()
    following, spoken = 0, 0.0
    made = 0
    for outcome in outcomes(family.frames_of, tasks, options.workers, options.task_seconds, late):
        waiting[outcome.place] = outcome.result
        if outcome.failure:
            failures[outcome.failure] += 1
            if sum(failures.values()) >= 100 and not made:
                raise RuntimeError(f"100 tasks failed and none went well; most often: {failures.most_common(1)[0][0]}")
        else:
            made += len(outcome.result.energy)
        while following in waiting and shards.frames < options.frames:
            if (frames := waiting.pop(following)) is not None:
                shards.add(frames)
            following += 1
        if shards.frames >= options.frames:
            break
        if time.monotonic() - spoken > 5.0:
            spoken = time.monotonic()
            seconds = spoken - began
            print(
                f"{seconds:6.0f} s  {made:8d} of {options.frames} frames  {made / max(seconds, 1e-9):6.1f} frames/s  "
                f"{following} tasks, {sum(failures.values())} failed",
                flush=True,
            )
    else:  # out of time: what is done counts, though gaps are left
        for place in sorted(waiting):
            if (frames := waiting[place]) is not None and shards.frames < options.frames:
                shards.add(frames)
    seconds = time.monotonic() - began
    shards.close()
    summary = shards.summary() | {
        "seconds": round(seconds, 1),
        "frames_per_second": round(shards.frames / max(seconds, 1e-9), 1),
        "workers": options.workers,
        "failed_tasks": dict(failures.most_common(30)),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


class Shards:
    """Files that are filled one after the other; each is written whole under another name and then renamed."""

    def __init__(self, folder: Path, options: Options, family: Family) -> None:
        self._folder, self._options, self._family = folder, options, family
        self._pending: dict[str, list[Frames]] = {"train": [], "valid": [], "test": []}
        self._written: list[Path] = []
        self._sums: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = {"split": Counter(), "group": Counter(), "kind": Counter()}
        self._squares, self._largest = 0.0, 0.0  # of force components, and of one atom's force
        self.frames = 0

    def add(self, frames: Frames) -> None:
        """Take a group in; write a file when there is enough for one."""
        self._sums.update({f"dropped_{reason}": count for reason, count in frames.dropped.items()})
        count = len(frames.energy)
        if not count:
            return
        self.frames += count
        self._sums.update(groups=1, atoms=count * len(frames.numbers))
        self._counts["split"][frames.task.split] += count
        self._counts["group"][frames.task.kind] += count
        self._counts["kind"].update(frames.kinds)
        self._squares += float((frames.forces**2).sum())
        self._largest = max(self._largest, float(np.linalg.norm(frames.forces, axis=-1).max()))
        pending = self._pending[frames.task.split]
        pending.append(frames)
        if frames.task.split == "train" and sum(len(f.energy) for f in pending) >= self._options.shard_frames:
            self._write("train", f"train-{self._shards():02d}.h5")

    def close(self) -> None:
        """Write what is left."""
        if self._pending["train"]:
            self._write("train", f"train-{self._shards():02d}.h5")
        for split in ("valid", "test"):
            if self._pending[split]:
                self._write(split, f"{split}.h5")

    def summary(self) -> dict[str, Any]:
        """Return counts, drops and sizes."""
        sizes = {path.name: path.stat().st_size for path in self._written}
        total, atoms = sum(sizes.values()), max(self._sums["atoms"], 1)
        return {
            "frames": self.frames,
            "groups": self._sums["groups"],
            "mean_atoms": round(atoms / max(self.frames, 1), 2),
            "rms_force": round(float(np.sqrt(self._squares / (3 * atoms))), 4),
            "max_force": round(self._largest, 3),
            **{f"frames_by_{name}": dict(counts) for name, counts in self._counts.items()},
            "dropped": {key[8:]: count for key, count in self._sums.items() if key.startswith("dropped_")},
            "bytes": sizes,
            "bytes_per_frame": round(total / max(self.frames, 1), 1),
        }

    def _shards(self) -> int:
        return sum(path.name.startswith("train-") for path in self._written)

    def _write(self, split: str, name: str) -> None:
        groups, self._pending[split] = self._pending[split], []
        family = self._family
        attributes = family.provenance | {"title": f"{family.title}, {split}", "groups": family.groups}
        path = self._folder / name
        write_whole(path, (packed(frames, force_scale=1e-3) for frames in groups), attributes)
        self._written.append(path)


def packed(frames: Frames, force_scale: float, **attributes: Any) -> PackedGroup:
    """Return the group for the file."""
    task = frames.task
    return PackedGroup(
        numbers=frames.numbers,
        positions=frames.positions,
        energy=frames.energy,
        forces=frames.forces,
        cell=frames.cell,
        stress=frames.stress,
        name=task.kind,
        key=f"{task.index:06d}",
        attributes={"split": task.split, **task.origin, "frames": kinds(frames.kinds), **attributes},
        position_scale=task.position_scale,
        force_scale=force_scale,
    )


def kinds(names: Sequence[str]) -> str:
    """Return the frames' kinds in order, runs written as `kind*count`."""
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def write_whole(path: Path, groups: Iterator[PackedGroup], attributes: dict[str, Any]) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(f".{path.stem}.part.h5")
    write_packed(part, groups, attributes)
    part.replace(path)


def write_atoms(path: Path, elements: Sequence[str], options: Options) -> None:
    """Write the free atoms' energies, one frame for each element."""
    chem = molecules.require("rdkit.Chem")
    groups = [
        PackedGroup(
            numbers=np.array([chem.GetPeriodicTable().GetAtomicNumber(symbol)]),
            positions=np.zeros((1, 1, 3)),
            energy=np.array([energy]),
            forces=np.zeros((1, 1, 3)),
            spin=np.array([generate.UNPAIRED[symbol] + 1]),
            name="isolated_atoms",
            key=f"atom_{symbol}",
            attributes={"split": "isolated_atoms"},
        )
        for symbol, energy in generate.free_atoms(elements).items()
    ]
    title = {"title": "free atoms, with the unpaired electrons of Hund's rule, GFN2-xTB without spin polarisation"}
    write_whole(path, iter(groups), provenance(options) | title)


def provenance(options: Options) -> dict[str, Any]:
    """Return what a file of molecules says of how it was made."""
    sources = (Path(__file__), Path(str(molecules.__file__)), Path(str(generate.__file__)))
    return {
        "method": f"{generate.METHOD}, tblite accuracy {generate.LABEL_ACCURACY}, electronic temperature 300 K",
        "units": "Å, eV, eV/Å; total energies; closed shell, charge 0, no periodicity",
        "tblite": metadata.version("tblite"),
        "rdkit": metadata.version("rdkit"),
        "licence": "CC0-1.0: made by this project and put in the public domain",
        **common_provenance(options, sources),
    }


def common_provenance(options: Options, sources: Sequence[Path]) -> dict[str, Any]:
    """Return what every file says of how it was made; `sources` are the files of code that decide that."""
    unused = ("output", "workers", *(("elements",) if options.what == "crystals" else ()))
    return {
        "numpy": np.__version__,
        "python": platform.python_version(),
        "command": " ".join(
            f"{key}={value}" for key, value in dataclasses.asdict(options).items() if key not in unused
        ),
        "seed": options.seed,
        "script": "scripts/make_dataset.py",
        "script_sha256": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


# The embedded set's trajectories: split, temperature in K, walkers, frames of each. A walker is a trajectory of its
# own, with its own random numbers, from a conformer of its own.
WALKS = (
    ("train", 300, 5, 100),
    ("valid", 300, 2, 50),
    ("test", 300, 3, 50),
    ("test", 600, 3, 50),
    ("test", 1200, 3, 50),
)
EQUILIBRATION = 2000  # time steps of 0.5 fs before the first frame: 20 times the friction's 50 fs
SPACING = 100  # time steps between frames
VARIED = {"train": 60, "valid": 10, "test": 20}  # molecules of the second file
VARIED_FRAMES = 6
EMBEDDED_GRID = 1e-4  # Å and eV/Å


def make_embedded(options: Options) -> None:
    """Write acetylcysteine.h5 (dynamics of a flexible molecule), molecules.h5 (varied molecules) and atoms.h5."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_atoms(folder / "atoms.h5", molecules.ELEMENTS + molecules.MORE_ELEMENTS, options)
    make_varied(folder / "molecules.h5", options)
    make_dynamics(folder / "acetylcysteine.h5", options)


def make_varied(path: Path, options: Options) -> None:
    """Write a few frames each of molecules that are split so that none is in two splits."""
    names = list(itertools.islice(molecules.molecules(options.seed, max_atoms=20), 1500))
    random.Random(options.seed).shuffle(names)
    wanted, groups, dropped = Counter(VARIED), [], Counter[str]()
    for index, smiles in enumerate(names):
        split = molecules.split_of(smiles)
        if not wanted[split]:
            continue
        task = generate.Task(index, options.seed + index, "molecules", (smiles,), split, VARIED_FRAMES, EMBEDDED_GRID)
        try:
            frames = generate.frames_of(task)
        except generate.LabelError:
            continue
        dropped.update(frames.dropped)
        if len(frames.energy) == VARIED_FRAMES:
            wanted[split] -= 1
            groups.append(packed(frames, EMBEDDED_GRID))
    if any(wanted.values()):
        raise RuntimeError(f"1,500 molecules were not enough; still missing: {dict(wanted)}")
    about = {
        "title": "varied molecules over H C N O F P S Cl, split by molecule",
        "groups": "each HDF5 group is one molecule; its frames attribute tells how each frame was made",
    }
    write_whole(path, iter(groups), provenance(options) | about)
    print(f"{path}: {sum(len(group.energy) for group in groups)} frames, dropped {dict(dropped)}", flush=True)


def make_dynamics(path: Path, options: Options) -> None:
    """Write Langevin dynamics of the flexible molecule at 300, 600 and 1200 K."""
    molecule, numbers = generate.embedded(molecules.FLEXIBLE, options.seed, conformers=20)
    masses, gfn2 = generate.masses_of(numbers), generate.GFN2(numbers)
    bottoms, energies = [], []
    for conformer in range(molecule.GetNumConformers()):
        field = generate.ForceField(molecule, conformer)
        start = field.minimum()
        bottoms.append(generate.relaxed(gfn2, start, generate.force_field_hessian(field, start), steps=60)[-1])
        energies.append(gfn2(bottoms[-1])[0])
    heights = np.array(energies) - min(energies)
    print(f"conformers at {', '.join(f'{height:.3f}' for height in np.sort(heights))} eV", flush=True)

    groups, began = [], time.monotonic()
    for place, (split, temperature, walkers, count) in enumerate(WALKS):
        # Starting conformers by their weight at twice the temperature: the low ones, but not always the lowest.
        weights = np.exp(-heights / (2 * generate.BOLTZMANN * temperature))
        for walker in range(walkers):
            rng = np.random.default_rng([options.seed, place, walker])
            start = bottoms[int(rng.choice(len(bottoms), p=weights / weights.sum()))]
            kinetic: list[float] = []
            walk = generate.langevin(
                gfn2, start, masses, temperature, rng, SPACING, EQUILIBRATION // SPACING + count,
                report=lambda energy, _, kinetic=kinetic: kinetic.append(energy),
            )  # fmt: skip
            geometries = [("dynamics", there) for there in itertools.islice(walk, EQUILIBRATION // SPACING, None)]
            index = 10 * place + walker
            task = generate.Task(
                index, options.seed, f"{temperature}K", (molecules.FLEXIBLE,), split, count, EMBEDDED_GRID
            )
            frames = generate.label_frames(task, numbers, geometries, Counter())
            broken = sum(not generate.intact(molecule, there) for there in frames.positions)
            mean = 2 * float(np.mean(kinetic[EQUILIBRATION // SPACING :])) / (3 * len(numbers) * generate.BOLTZMANN)
            print(
                f"{time.monotonic() - began:6.0f} s  {split:5s} {temperature:4d} K  {len(frames.energy)} frames, "
                f"kinetic temperature {mean:.0f} K, {broken} with a broken or new bond",
                flush=True,
            )
            if len(frames.energy) != count or (temperature == 300 and broken):
                raise RuntimeError(f"the walk {index} lost frames ({dict(frames.dropped)}) or the molecule came apart")
            about = {"temperature": temperature, "walker": walker, "kinetic_temperature": mean, "broken": broken}
            groups.append(packed(frames, EMBEDDED_GRID, **about))
    about = {
        "title": "N-acetylcysteine (C5H9NO3S), GFN2-xTB Langevin dynamics",
        "groups": (
            "each HDF5 group is one trajectory at one temperature (its name), from its own conformer with its own "
            f"random numbers; time step 0.5 fs, friction 0.02/fs, {EQUILIBRATION // 2} fs before the first frame, "
            f"{SPACING // 2} fs between frames; broken counts frames in which a bond is broken or new"
        ),
    }
    write_whole(path, iter(groups), provenance(options) | about)


if __name__ == "__main__":
    raise SystemExit(main())
