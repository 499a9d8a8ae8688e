"""Runs what a policy does in a step by NumPy: the trainer traces it, a client needs no JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Operation = Callable[..., Any]


def encode(array: Any) -> list:
    """Return an array as it travels: dtype, shape and bytes, little-endian and in C order."""
    given = np.asarray(array)
    return [given.dtype.str, list(given.shape), given.tobytes()]


def decode(data: Sequence[Any]) -> np.ndarray:
    """Return the array that ``encode`` made."""
    dtype, shape, elements = data
    return np.frombuffer(elements, np.dtype(dtype)).reshape(shape)


class Program:
    """A function of arrays, as a list of equations with XLA's operations."""

    def __init__(self, description: dict[str, Any], random: np.random.Generator) -> None:
        """Read what ``traced`` of the trainer's side wrote.

        Args:
          description: Numbers of values: ``size`` in all, ``inputs`` (-1 for an input that is not
            used), ``outputs``; ``constants`` as ``[number, array]``; ``equations`` as ``[operation,
            parameters, inputs, output]``.
          random: Draws what the policy draws.

        Raises:
          ValueError: An operation is unknown.
        """
        self._size: int = description["size"]
        self._inputs = [
            (at, None if dtype is None else np.dtype(dtype))
            for at, dtype in zip(description["inputs"], description["dtypes"], strict=True)
        ]
        self._outputs: list[int] = description["outputs"]
        self._constants = [(at, decode(array)) for at, array in description["constants"]]
        self._steps = [
            (_made(name, parameters, random), inputs, output)
            for name, parameters, inputs, output in description["equations"]
        ]

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        """Return the outputs for all inputs, in their order."""
        values: list[Any] = [None] * self._size
        for at, constant in self._constants:
            values[at] = constant
        for (at, dtype), array in zip(self._inputs, arrays, strict=True):
            if at >= 0:
                values[at] = np.asarray(array, dtype)
        with np.errstate(all="ignore"):
            for operation, inputs, output in self._steps:
                values[output] = operation(*[values[at] for at in inputs])
        return [np.asarray(values[at]) for at in self._outputs]


def _made(name: str, parameters: dict[str, Any], random: np.random.Generator) -> Operation:
    if name in DIRECT:
        return DIRECT[name]
    if name in WITH_PARAMETERS:
        return WITH_PARAMETERS[name](**parameters)
    if name in DRAWN:
        return DRAWN[name](random, **parameters)
    raise ValueError(f"this client does not know the operation {name!r}; install a newer one")


def _erf_inv(x: np.ndarray) -> np.ndarray:
    """Giles 2010, "Approximating the erfinv function", single precision."""
    w = -np.log1p(-x * x)
    near, far = w - np.float32(2.5), np.sqrt(np.maximum(w, 5)) - np.float32(3)
    of_near = (
        *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
        *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    )
    of_far = (
        *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
        *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
    )
    chosen = np.where(w < 5, np.polyval(np.array(of_near), near), np.polyval(of_far, far))
    return np.where(np.abs(x) == 1, np.copysign(np.inf, x), chosen * x).astype(x.dtype)


def _each(function: Callable[[float], float]) -> Operation:
    return lambda x: np.vectorize(function, otypes=[x.dtype])(x)


def _logistic(x: np.ndarray) -> np.ndarray:
    return (0.5 * (np.tanh(0.5 * x) + 1)).astype(x.dtype)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which.astype(np.bool_), cases[1], cases[0])
    return np.choose(which, cases)


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


def _bits_or_numbers(bitwise: Operation, logical: Operation) -> Operation:
    def chosen(*arrays: np.ndarray) -> np.ndarray:
        return (logical if arrays[0].dtype == np.bool_ else bitwise)(*arrays)

    return chosen


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind == "f":
        return x / y
    return np.trunc(x / y).astype(x.dtype)


DIRECT: dict[str, Operation] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "log", "log1p", "expm1", "tanh")},
    **{name: getattr(np, name) for name in ("sin", "cos", "sqrt", "square", "sign", "floor")},
    **{name: getattr(np, name) for name in ("ceil", "abs")},
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divided},
    **{"max": np.maximum, "min": np.minimum, "pow": np.power, "rem": np.fmod, "neg": np.negative},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "is_finite": np.isfinite},
    "and": _bits_or_numbers(np.bitwise_and, np.logical_and),
    "or": _bits_or_numbers(np.bitwise_or, np.logical_or),
    "xor": _bits_or_numbers(np.bitwise_xor, np.logical_xor),
    "not": _bits_or_numbers(np.invert, np.logical_not),
    "shift_left": np.left_shift,
    "shift_right_logical": lambda x, y: (x.view(f"u{x.itemsize}") >> y).view(x.dtype),
    "logistic": _logistic,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
    "erf_inv": _erf_inv,
    "select_n": _select,
    "clamp": _clamp,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    # A key is a zero: random numbers are the client's own.
    "random_unwrap": lambda key: np.zeros((*key.shape, 2), np.uint32),
    "random_wrap": lambda data: np.zeros(data.shape[:-1], np.uint32),
    "random_fold_in": lambda key, data: key,
    "random_seed": lambda seeds: np.zeros(seeds.shape, np.uint32),
}
"""Operations without parameters that matter, by XLA's names."""


def _reduced(function: Operation, keeps: bool = True) -> Callable[..., Operation]:
    def made(axes: Sequence[int], **_: Any) -> Operation:
        over = tuple(axes)

        def run(x: np.ndarray) -> np.ndarray:
            return np.asarray(function(x, axis=over)).astype(x.dtype if keeps else np.bool_)

        return run

    return made


def _index_of(function: Operation) -> Callable[..., Operation]:
    def made(axes: Sequence[int], index_dtype: str, **_: Any) -> Operation:
        return lambda x: function(x, axis=axes[0]).astype(index_dtype)

    return made


def _broadcast(shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Operation:
    def run(x: np.ndarray) -> np.ndarray:
        aligned = [1] * len(shape)
        for size, axis in zip(np.shape(x), broadcast_dimensions, strict=True):
            aligned[axis] = size
        return np.broadcast_to(np.reshape(x, aligned), shape)

    return run


def _iota(dtype: str, shape: Sequence[int], dimension: int, **_: Any) -> Operation:
    along = [1] * len(shape)
    along[dimension] = shape[dimension]
    made = np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(along), shape)
    return lambda: made


def _dot(dimension_numbers: Any, **_: Any) -> Operation:
    (left, right), (of_left, of_right) = dimension_numbers
    if of_left:

        def batched(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            names_x, names_y = list(range(x.ndim)), list(range(100, 100 + y.ndim))
            for a, b in (*zip(of_left, of_right, strict=True), *zip(left, right, strict=True)):
                names_y[b] = names_x[a]
            batch = [names_x[a] for a in of_left]
            dropped = {*batch, *(names_x[a] for a in left)}
            rest = [name for name in (*names_x, *names_y) if name not in dropped]
            place = {name: k for k, name in enumerate(dict.fromkeys((*names_x, *names_y)))}
            lists = ([place[n] for n in names] for names in (names_x, names_y, batch + rest))
            first, second, out = lists
            return np.einsum(x, first, y, second, out)

        return batched
    return lambda x, y: np.tensordot(x, y, (tuple(left), tuple(right)))


def _slice(
    start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any = None, **_: Any
) -> Operation:
    steps = strides or [1] * len(start_indices)
    where = tuple(map(slice, start_indices, limit_indices, steps))
    return lambda x: x[where]


def _power(y: int, **_: Any) -> Operation:
    return lambda x: (x**y).astype(x.dtype)


WITH_PARAMETERS: dict[str, Callable[..., Operation]] = {
    "reduce_sum": _reduced(np.sum),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_prod": _reduced(np.prod),
    "reduce_and": _reduced(np.all, keeps=False),
    "reduce_or": _reduced(np.any, keeps=False),
    "argmax": _index_of(np.argmax),
    "argmin": _index_of(np.argmin),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "dot_general": _dot,
    "slice": _slice,
    "integer_pow": _power,
    "reshape": lambda new_sizes, **_: lambda x: np.reshape(x, new_sizes),
    "squeeze": lambda dimensions, **_: lambda x: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda dimensions, **_: lambda x: np.expand_dims(x, tuple(dimensions)),
    "transpose": lambda permutation, **_: lambda x: np.transpose(x, permutation),
    "concatenate": lambda dimension, **_: lambda *xs: np.concatenate(xs, dimension),
    "stack": lambda axis, **_: lambda *xs: np.stack(xs, axis),
    "rev": lambda dimensions, **_: lambda x: np.flip(x, tuple(dimensions)),
    "convert_element_type": lambda new_dtype, **_: lambda x: np.asarray(x).astype(new_dtype),
    "bitcast_convert_type": lambda new_dtype, **_: (
        lambda x: np.ascontiguousarray(x).view(new_dtype)
    ),
}
"""Makers of operations from their parameters."""


def _bits(random: np.random.Generator, bit_width: int, shape: Sequence[int], **_: Any) -> Operation:
    def run(key: np.ndarray) -> np.ndarray:
        size = (*key.shape, *shape)
        return random.integers(0, 1 << bit_width, size, f"u{bit_width // 8}")

    return run


DRAWN: dict[str, Callable[..., Operation]] = {
    "random_bits": _bits,
    "random_split": lambda random, shape, **_: (
        lambda key: np.zeros((*key.shape, *shape), np.uint32)
    ),
}
"""Makers of operations that draw."""
KNOWN = DIRECT.keys() | WITH_PARAMETERS.keys() | DRAWN.keys()
"""What a client can run."""
