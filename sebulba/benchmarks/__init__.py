"""``sebulba bench``: figures, with the command, the configuration and the machine that made them.

This folder serves users: ``train``, ``scale``, ``tune``, ``learn`` and ``memory`` measure a
configuration of theirs on their machine. What measures only the project itself, against bars of
its own, is in ``project``. Nothing here imports from there, except the table of commands
(``command_line``) and ``train --compare prototype``.
"""
