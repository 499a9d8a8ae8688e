"""What measures Sebulba itself rather than a user's run.

``learn`` trains presets until their goals, ``rivals`` other libraries beside. ``inference``,
``overhead`` and ``start`` compare with the least that the same work can cost, ``prototype`` is the
rival of ``python -m benchmarks train --compare prototype``, and ``report`` sets all results against
their bars.
"""
