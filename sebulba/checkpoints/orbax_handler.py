"""A handler by which orbax writes NumPy arrays. This module imports orbax, and with it JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp


class PatientNumpyHandler(ocp.type_handlers.NumpyHandler):
    """Saves each array by itself, and waits for all of them even if one fails.

    orbax's own handler returns when the first array fails, as on a full disk. The other writes
    would go on in a folder that is being deleted, and each would print an error when it ends.
    """

    def __init__(self) -> None:
        """Make a handler that does not copy what it saves."""
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.Future]:
        """Begin to write ``values``; the future that is returned ends when all are written."""
        futures: list[ocp.Future] = []
        for value, info, arg in zip(
            values, infos, args or [ocp.SaveArgs()] * len(values), strict=True
        ):
            futures += await super().serialize([value], [info], [arg])
        return [_All(futures)]


class _All:
    """A future that ends when all of its futures have ended."""

    def __init__(self, futures: Sequence[ocp.Future]) -> None:
        self._futures = futures

    def result(self, timeout: float | None = None) -> None:
        """Wait for all futures, then raise the error of the first that failed."""
        errors = []
        for future in self._futures:
            try:
                future.result(timeout)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def cancel(self) -> None:
        """Cancel all futures."""
        for future in self._futures:
            future.cancel()
