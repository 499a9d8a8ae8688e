"""The project's own benchmarks: ``python -m benchmarks BENCHMARK`` from a checkout.

``studies`` has what measures Sebulba itself, ``results`` what was found. What measures a run of the
user's on their machine is ``sebulba bench``, in the package, which imports nothing from here.
"""
