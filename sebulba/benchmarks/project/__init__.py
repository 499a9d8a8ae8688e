"""What measures Sebulba itself rather than a user's run.

``inference``, ``overhead`` and ``start`` compare it with the least that the same work can cost,
``prototype`` is the rival of ``bench train --compare prototype``, and ``report`` sets all results
against their bars.
"""
