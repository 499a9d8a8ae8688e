# SPDX-License-Identifier: GPL-2.0-or-later
"""Compiles the engine."""

from sebulba_ns3 import library

if __name__ == "__main__":
    print(library())
