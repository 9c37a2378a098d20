"""Every choice that defines a SeZM model, with the defaults of the published architecture.

The names are those of the DPA4 literature and of its checkpoints, so that a configuration can be compared with a
published one line by line. Two options are ours: `exclude_types` and `atom_exclude_types` name elements by symbol.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

ResidualQuery = Literal["none", "dependent", "independent"]


@dataclass(frozen=True)
class Options:
    """The hyper-parameters of a SeZM model. Lengths in Å."""

    # Neighbourhood and radial features
    rcut: float = 6.0  # Å
    env_exp: tuple[int, int] = (7, 5)  # exponents of the radial-basis and of the message envelope
    basis_type: Literal["bessel", "gaussian"] = "bessel"
    n_radial: int = 16
    radial_mlp: tuple[int, ...] = (0,)  # hidden widths, 0 means `channels`
    edge_norm: bool = True
    eps: float = 1e-7  # Å, smooths lengths at zero distance
    random_gamma: bool = True  # random roll of the edge frames while training
    exclude_types: tuple[tuple[str, str], ...] = ()  # pairs of elements without edges between them
    atom_exclude_types: tuple[str, ...] = ()  # elements whose atoms have no energy

    # Width, degrees, depth
    channels: int = 64
    lmax: int = 3
    mmax: int | None = 1  # None means lmax
    kmax: int = 1
    l_schedule: tuple[int, ...] | None = None  # degree of each block, non-increasing; overrides lmax and n_blocks
    m_schedule: tuple[int, ...] | None = None
    extra_node_l: int = 0
    n_blocks: int = 3
    ffn_blocks: int = 1
    ffn_neurons: int = 0  # 0 means automatic

    # SO(2) convolution
    mixing_layers: int = 4
    so2_norm: bool = False
    radial_so2_mode: Literal["none", "degree", "degree_channel"] = "degree_channel"
    radial_so2_rank: int = 1
    n_focus: int = 1
    focus_dim: int = 0  # 0 means `channels`
    n_atten_head: int = 1  # 0 means a plain envelope-weighted sum
    atten_f_mix: bool = False
    atten_v_proj: bool = False
    atten_o_proj: bool = False
    edge_cartesian: bool = False
    node_cartesian: str = "none"  # "none", "default:<layers>" or "parity:<layers>"

    # Norms, scales, residuals
    sandwich_norm: tuple[bool, bool, bool, bool] = (False, True, True, False)  # so2 pre, so2 post, ffn pre, ffn post
    mlp_bias: bool = False
    layer_scale: bool = False
    so2_attn_res: ResidualQuery = "none"
    full_attn_res: ResidualQuery = "none"
    block_attn_res: ResidualQuery = "none"

    # Grid nonlinearities
    s2_activation: tuple[bool, bool] = (False, True)  # in the SO(2) stack, in the feed-forward network
    ffn_so3_grid: bool = False
    node_wise_s2: bool = False
    node_wise_so3: bool = False
    message_node_s2: bool = False
    message_node_so3: bool = False
    grid_mlp: tuple[bool, bool, bool] = (False, False, False)  # node-wise, message-node, feed-forward
    grid_branch: tuple[int, int, int] = (0, 0, 0)
    lebedev_quadrature: tuple[bool, bool] = (True, True)  # in the SO(2) stack, elsewhere

    # Activations, initial features, read-out
    activation_function: str = "silu"
    glu_activation: bool = True
    use_env_seed: bool = True
    add_chg_spin_ebd: bool = False
    default_chg_spin: tuple[float, float] | None = None
    use_spin: tuple[str, ...] = ()  # elements that carry a native spin vector
    so3_readout: Literal["none", "glu", "mlp"] = "none"
    readout_layers: int = 1

    # Energy head
    fitting_neuron: tuple[int, ...] = (0,)  # hidden widths, 0 means automatic
    fitting_activation: str = "silu"
    bias_out: bool = False
    numb_fparam: int = 0
    numb_aparam: int = 0
    dim_case_embd: int = 0
    case_film_embd: bool = False

    # Short-range bridging
    bridging_method: Literal["none", "zbl"] = "none"
    bridging_r_inner: float = 0.5  # Å
    bridging_r_outer: float = 0.8  # Å

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Options:
        """Build options from plain values as they stand in YAML or JSON.

        Lists become tuples; a single value of `grid_mlp`, `grid_branch` or `lebedev_quadrature` counts for all places.

        Raises:
            ValueError: a name is unknown (the nearest right one is given), or a value is of the wrong kind or range.
        """
        types = get_type_hints(cls)
        known = {}
        for name, value in values.items():
            if name not in types:
                near = difflib.get_close_matches(name, types, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown model option {name!r}{hint}")
            if name in _REPEATED and not isinstance(value, list | tuple):
                value = (value,) * _REPEATED[name]
            known[name] = _as_type(name, value, types[name])
        options = cls(**known)
        options._check()
        return options

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values (tuples as lists), the inverse of `from_mapping`."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @property
    def degrees(self) -> tuple[int, ...]:
        """Message degree of each block."""
        return self.l_schedule if self.l_schedule is not None else (self.lmax,) * self.n_blocks

    @property
    def orders(self) -> tuple[int, ...]:
        """Message order of each block, never above its degree."""
        if self.m_schedule is not None:
            orders = self.m_schedule
        else:
            orders = tuple(degree if self.mmax is None else self.mmax for degree in self.degrees)
        return tuple(min(order, degree) for order, degree in zip(orders, self.degrees, strict=True))

    @property
    def node_degrees(self) -> tuple[int, ...]:
        """Node degree of each block; the first is also that of the initial features."""
        return tuple(degree + self.extra_node_l for degree in self.degrees)

    @property
    def first_degree(self) -> int:
        """Degree of the initial node features."""
        return self.node_degrees[0] if self.degrees else self.lmax + self.extra_node_l

    @property
    def last_degree(self) -> int:
        """Degree of the node features that the read-out sees."""
        return self.node_degrees[-1] if self.degrees else self.first_degree

    @property
    def focus_width(self) -> int:
        """Channels of one focus stream."""
        return self.focus_dim or self.channels

    def _check(self) -> None:
        """Raise ValueError where options contradict each other."""
        positive = ("rcut", "n_radial", "channels", "n_focus", "ffn_blocks", "readout_layers")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"model option {name} must be positive; got {getattr(self, name)}")
        if not 0 <= self.lmax <= 10:
            raise ValueError(f"model option lmax must be between 0 and 10; got {self.lmax}")
        if self.kmax > self.lmax:
            raise ValueError(f"model option kmax must not exceed lmax = {self.lmax}; got {self.kmax}")
        if any(a < b for a, b in itertools.pairwise(self.degrees)):
            raise ValueError(f"model option l_schedule must not increase; got {list(self.degrees)}")
        if self.m_schedule is not None and len(self.m_schedule) != len(self.degrees):
            raise ValueError(
                f"model option m_schedule needs one order for each of {len(self.degrees)} blocks; "
                f"got {list(self.m_schedule)}"
            )
        if self.full_attn_res != "none" and self.block_attn_res != "none":
            raise ValueError("model options full_attn_res and block_attn_res exclude each other; set one to none")
        if self.n_atten_head:
            width = self.focus_width * (self.n_focus if self.atten_f_mix else 1)
            if width % self.n_atten_head:
                raise ValueError(f"model option n_atten_head = {self.n_atten_head} does not divide the width {width}")
        if self.edge_cartesian and self.lmax not in (1, 2):
            raise ValueError(f"model option edge_cartesian needs lmax 1 or 2; got {self.lmax}")
        if not 0 < self.bridging_r_inner < self.bridging_r_outer:
            raise ValueError(
                "model options must satisfy 0 < bridging_r_inner < bridging_r_outer; "
                f"got {self.bridging_r_inner} and {self.bridging_r_outer} Å"
            )
        for name in ("activation_function", "fitting_activation"):
            if getattr(self, name) not in ACTIVATIONS:
                raise ValueError(
                    f"model option {name} must be one of {', '.join(ACTIVATIONS)}; got {getattr(self, name)!r}"
                )
        mode, _, layers = self.node_cartesian.partition(":")
        if self.node_cartesian != "none":
            if mode not in ("default", "parity") or not layers.isdigit():
                raise ValueError(
                    'model option node_cartesian must be none, "default:<n>" or "parity:<n>"; '
                    f"got {self.node_cartesian!r}"
                )
            if self.lmax not in (1, 2):
                raise ValueError(f"model option node_cartesian needs lmax 1 or 2; got {self.lmax}")


ACTIVATIONS: tuple[str, ...] = ("silu", "tanh", "relu", "gelu", "sigmoid", "softplus", "linear")
"""Names of the pointwise activations that a configuration may ask for."""


def automatic_width(channels: int, glu: bool) -> int:
    """Return the hidden width that stands for 0: about 8/3 (with GLU) or 4 times the channels, in multiples of 32."""
    return 32 * math.ceil((8 * channels / 3 if glu else 4 * channels) / 32)


_REPEATED = {"grid_mlp": 3, "grid_branch": 3, "lebedev_quadrature": 2}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _as_type(name: str, value: Any, expected: Any) -> Any:
    """Return `value` as the annotated type, or raise ValueError with both."""
    args = get_args(expected)
    if expected in (int, float, bool, str):
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if expected is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, expected) and not (expected is int and isinstance(value, bool)):
            return value
    elif type(None) in args:  # X | None
        if value is None:
            return None
        return _as_type(name, value, next(arg for arg in args if arg is not type(None)))
    elif getattr(expected, "__origin__", None) is Literal:
        if value in args:
            return value
        raise ValueError(f"model option {name} must be one of {', '.join(map(str, args))}; got {value!r}")
    elif getattr(expected, "__origin__", None) is tuple and isinstance(value, list | tuple):
        if args[-1] is Ellipsis:
            return tuple(_as_type(name, item, args[0]) for item in value)
        if len(value) == len(args):
            return tuple(_as_type(name, item, arg) for item, arg in zip(value, args, strict=True))
    readable = getattr(expected, "__name__", None) if expected in (int, float, bool, str) else str(expected)
    raise ValueError(f"model option {name} must be {readable}; got {value!r}")
